"""The vendor's fused operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fd_accelerator import vendor_operators
from fd_accelerator.vendor_operators import VendorOperators

if TYPE_CHECKING:
    from fastdeploy_core.contracts import Candidate
    from fastdeploy_core.contracts.attention import AttentionQuestion
    from fastdeploy_core.contracts.moe import MoEQuestion

OPERATORS = VendorOperators("fastdeploy_ops")
ATTENTION = ("get_infer_param", "block_attn")


def answer_attention(question: AttentionQuestion) -> Candidate:
    """Whether driver `xpu_block` can serve the layer."""
    return vendor_operators.answer_attention(
        question,
        driver="xpu_block",
        device="xpu",
        operators=OPERATORS,
        needed=ATTENTION,
        dtypes=("bfloat16", "float16"),
    )


def answer_moe(question: MoEQuestion) -> Candidate:
    """Whether driver `xpu_moe` can serve the layers."""
    return vendor_operators.answer_moe(
        question,
        driver="xpu_moe",
        device="xpu",
        operators=OPERATORS,
        needed=("xpu_moe_layer",),
        dtypes=("bfloat16",),
    )
