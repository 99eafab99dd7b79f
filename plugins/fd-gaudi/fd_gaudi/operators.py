"""The vendor's fused operators, and the cells of the kernel table: the cache write, without which
every write would copy the whole pool, and experts of fixed shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fd_accelerator import vendor_operators
from fd_accelerator.vendor_operators import VendorOperators

from fastdeploy_core.contracts.base import Candidate, Decline
from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionQuestion
    from fastdeploy_core.contracts.moe import MoEQuestion
    from fastdeploy_core.tensor import Tensor

OPERATORS = VendorOperators("paddlenlp_ops", "fastdeploy_ops")
ATTENTION = ("fused_block_attention", "fused_qkv_rope", "fused_sdpa_proj_t", "index_copy_")


def answer_attention(question: AttentionQuestion) -> Candidate:
    """Whether driver `gaudi_block` can serve the layers."""
    if question.spec.head_norms or not question.plain_projections:
        what = "heads that are normalised" if question.spec.head_norms else "quantized projections"
        return Candidate(
            "gaudi_block", Decline(f"{what}; possible: plain matrices around attention")
        )
    return vendor_operators.answer_attention(
        question,
        driver="gaudi_block",
        device="gaudi",
        operators=OPERATORS,
        needed=ATTENTION,
        dtypes=("bfloat16", "float32"),
    )


def answer_moe(question: MoEQuestion) -> Candidate:
    """Whether driver `gaudi_moe` can serve the layers."""
    return vendor_operators.answer_moe(
        question,
        driver="gaudi_moe",
        device="gaudi",
        operators=OPERATORS,
        needed=("fused_gate_moe",),
        dtypes=("bfloat16",),
    )


def has_index_copy(facts: Mapping[str, Any]) -> bool:
    """The vendor's scatter along the first dimension."""
    return OPERATORS.has("index_copy_")


def kv_write(rows: tuple[Tensor, ...], cache: tuple[Tensor, ...], slot_mapping: Tensor) -> None:
    """Store each token's rows in its slot. Padding (slot -1) stores the first real token once more,
    or the content of slot 0, because shapes must not depend on the number of padding tokens."""
    if slot_mapping.shape[0] == 0:
        return
    xp = namespace(slot_mapping)
    is_real = slot_mapping >= 0
    first = xp.argmax(is_real.to(xp.int32), 0)
    places = xp.arange(slot_mapping.shape[0], dtype=xp.int64, device=slot_mapping.device)
    source = xp.where(is_real, places, first)
    slots = xp.clamp(xp.index_select(slot_mapping, 0, source), 0)
    has_real = is_real.any().reshape([1, 1, 1])
    for row, pool in zip(rows, cache, strict=True):
        flat = pool.view([pool.shape[0] * pool.shape[1], *pool.shape[2:]])
        stored = xp.index_select(flat, 0, slots)
        data = xp.where(has_real, xp.index_select(row, 0, source), stored)
        OPERATORS["index_copy_"](flat, slots, data, 0)


def kv_write_blocks(cache: tuple[Tensor, ...], blocks: Tensor, data: tuple[Tensor, ...]) -> None:
    """Overwrite whole blocks."""
    for pool, part in zip(cache, data, strict=True):
        OPERATORS["index_copy_"](pool, blocks, part, 0)


def moe_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Every expert over every token; results of experts that a token did not choose are left
    out."""
    xp = namespace(x)
    total = xp.zeros(list(x.shape), dtype=xp.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        chosen = topk_ids == expert
        weight = (chosen.float() * topk_weights).sum(1).unsqueeze(1)
        y = xp.linear(xp.silu_and_mul(xp.linear(x, gate_up[expert])), down[expert]).float()
        is_meant = chosen.any(1).unsqueeze(1)
        total = total + xp.where(is_meant, y * weight, xp.zeros_like(y))
    return total.to(x.dtype)
