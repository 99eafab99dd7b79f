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
EXPERT_ROWS = 32  # of one expert that are computed together
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
    """Rows by expert, in blocks of one expert each. There are as many blocks as the routing could
    need at most, for shapes must not depend on it; those that it does not need compute token 0."""
    xp, (tokens, top_k), num_experts = namespace(x), topk_ids.shape, gate_up.shape[0]
    pairs, size = tokens * top_k, min(tokens, EXPERT_ROWS)
    most = min(num_experts, pairs)  # experts that have rows
    num_blocks = most if tokens == size else (pairs - most) // size + most
    if pairs == 0:
        return xp.zeros_like(x)

    def count(end: int) -> Tensor:
        return xp.arange(end, dtype=xp.int64, device=x.device)

    expert = topk_ids.reshape([pairs])
    is_its = (expert.unsqueeze(1) == count(num_experts).unsqueeze(0)).to(xp.int64)
    number = (xp.cumsum(is_its, 0) * is_its).sum(1) - 1  # of a pair among its expert's
    ends = xp.cumsum((is_its.sum(0) + size - 1) // size, 0)
    before = xp.cat((ends[:1] * 0, ends[:-1]), 0)
    place = xp.index_select(before, 0, expert) * size + number
    source = xp.scatter(count(num_blocks * size) * 0, 0, place, count(pairs) // top_k)
    of_block = (count(num_blocks).unsqueeze(1) >= ends.unsqueeze(0)).to(xp.int64).sum(1)
    of_block = xp.clamp(of_block, 0, num_experts - 1)
    results = []
    for block in range(num_blocks):
        own = of_block[block : block + 1]
        rows = xp.index_select(x, 0, source[block * size : (block + 1) * size])
        hidden = xp.silu_and_mul(xp.linear(rows, xp.index_select(gate_up, 0, own)[0]))
        results.append(xp.linear(hidden, xp.index_select(down, 0, own)[0]))
    y = xp.index_select(xp.cat(results, 0), 0, place).reshape([tokens, top_k, -1]).float()
    return (y * topk_weights.unsqueeze(2)).sum(1).to(x.dtype)
