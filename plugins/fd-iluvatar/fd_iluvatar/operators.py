"""The vendor's fused operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fd_accelerator import vendor_operators
from fd_accelerator.vendor_operators import Int8Experts, VendorOperators

if TYPE_CHECKING:
    from fastdeploy_core.contracts import Candidate
    from fastdeploy_core.contracts.attention import AttentionQuestion

OPERATORS = VendorOperators("fastdeploy_ops")
ATTENTION = ("prefill_fused_paged_attention", "paged_attention")


def answer_attention(question: AttentionQuestion) -> Candidate:
    """Whether driver `iluvatar_paged` can serve the layer."""
    return vendor_operators.answer_attention(
        question,
        driver="iluvatar_paged",
        device="iluvatar",
        operators=OPERATORS,
        needed=ATTENTION,
        dtypes=("bfloat16", "float16"),
    )


# After each scale: zero points, which these weights have not.
moe_experts_wint8 = Int8Experts(
    OPERATORS,
    lambda weights, scales: (
        *(*weights, None, scales[0], None, scales[1], None),
        *(Int8Experts.ALGORITHM, -1, "prefill"),
    ),
)
