"""The vendor's fused operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fd_accelerator import vendor_operators
from fd_accelerator.vendor_operators import Int8Experts, VendorOperators

if TYPE_CHECKING:
    from fastdeploy_core.contracts import Candidate
    from fastdeploy_core.contracts.attention import AttentionQuestion

OPERATORS = VendorOperators("fastdeploy_ops")
ATTENTION = ("rotary_position_embedding", "write_cache_kv", "flash_attn_varlen_forward")


def answer_attention(question: AttentionQuestion) -> Candidate:
    """Whether driver `metax_flash` can serve the layer. Its output buffers are bfloat16."""
    return vendor_operators.answer_attention(
        question,
        driver="metax_flash",
        device="metax",
        operators=OPERATORS,
        needed=ATTENTION,
        dtypes=("bfloat16",),
    )


moe_experts_wint8 = Int8Experts(
    OPERATORS,
    lambda weights, scales: (*weights, None, *scales, None, Int8Experts.ALGORITHM),
)
