"""The vendor's fused operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts import vendor_operators
from fastdeploy_core.contracts.vendor_operators import EXPERT_OPERATORS, VendorOperators

if TYPE_CHECKING:
    from fastdeploy_core.contracts import Candidate
    from fastdeploy_core.contracts.attention import AttentionQuestion
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.tensor import Tensor

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


def has_experts(facts: Mapping[str, Any]) -> bool:
    """For sorting, multiplying and adding up."""
    return facts.get("dtype") in ("bfloat16", "float16") and OPERATORS.has(*EXPERT_OPERATORS)


def moe_experts_wint8(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
) -> Tensor:
    """int8 weights [experts, outputs, inputs] with a scale per output."""
    algorithm = "weight_only_int8"
    weights = [w.tensors["weight"] for w in (gate_up, down)]
    scales = [w.tensors["scale"].squeeze(-1).to(x.dtype) for w in (gate_up, down)]

    def compute(rows: Tensor, counts: Tensor) -> Tensor:
        # Behind each scale: zero points, which these weights have not.
        y: Tensor = OPERATORS["moe_expert_ffn"](
            *(rows, counts, *weights, None, scales[0], None, scales[1], None),
            *(algorithm, -1, "prefill"),
        )
        return y

    return vendor_operators.sorted_experts(
        OPERATORS, x, topk_ids, topk_weights, gate_up.num_experts, algorithm, compute
    )
