"""Which experts a token visits, and the order in which their products are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .common import cdiv, join_chain, options, pad2
from .sampling import ranked, unordered

if TYPE_CHECKING:
    from fastdeploy_core.contracts.moe import RoutingSpec

_SOFTMAX_FLOOR = 1e-12
_SIGMOID_FLOOR = 1e-20
# Experts, up to which each program of _place compares all pairs of them.
_MOST_SORTED = tl.constexpr(128)
_TAKEN = tl.constexpr(-(2**63))
# Up to here every expert's program looks at all assignments; above, each program looks at a few.
_FEW_SLOTS = 4096


@triton.jit
def _route(
    logits_p, bias_p, ids_p, weights_p, stride, part_stride, floor, scaling,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr, SHARED: tl.constexpr,
    FIRST: tl.constexpr, HELD: tl.constexpr, PAD_GROUPS: tl.constexpr, PAD_SIZE: tl.constexpr,
    PAD_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group = tl.arange(0, PAD_GROUPS)
    member = tl.arange(0, PAD_SIZE)
    expert = group[:, None] * SIZE + member[None, :]
    inside = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    x = tl.load(logits_p + token * stride + expert, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    for part in tl.static_range(1, PARTS):
        place = logits_p + part * part_stride + token * stride + expert
        x += tl.load(place, mask=inside, other=0.0)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        scores = tl.exp(x - tl.max(x))
        scores = scores / tl.sum(scores)
    ranking = scores
    if HAS_BIAS:
        ranking += tl.load(bias_p + expert, mask=inside, other=0.0)
    rank = tl.where(inside, ranked(ranking, expert), _TAKEN)
    if GROUPS > 1:
        # A group is worth its two best experts; what stands in the others is closed.
        best = tl.max(rank, 1)
        first = tl.sum(tl.where(rank == best[:, None], ranking, 0.0), 1)
        worth = first
        if SIZE > 1:
            rest = tl.where(rank == best[:, None], _TAKEN, rank)
            worth += tl.sum(tl.where(rest == tl.max(rest, 1)[:, None], ranking, 0.0), 1)
        order = tl.where(group < GROUPS, ranked(worth, group), _TAKEN)
        is_open = tl.zeros((PAD_GROUPS,), tl.int32)
        for _ in tl.static_range(OPEN):
            chosen = order == tl.max(order, 0)
            is_open = tl.where(chosen, 1, is_open)
            order = tl.where(chosen, _TAKEN, order)
        rank = tl.where((is_open == 1)[:, None], rank, _TAKEN)
    nth = tl.arange(0, PAD_K)
    ids = tl.zeros((PAD_K,), tl.int64)
    weights = tl.zeros((PAD_K,), tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(rank)
        chosen = rank == best
        ids = tl.where(nth == j, 0x7FFFFFFF - (best & 0x7FFFFFFF), ids)
        if HAS_BIAS:
            weight = tl.sum(tl.where(chosen, scores, 0.0))
        else:  # its score is in its rank
            weight = unordered(best >> 32)
        weights = tl.where(nth == j, weight, weights)
        rank = tl.where(chosen, _TAKEN, rank)
    if RENORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, 0), floor)
    # After the chosen ones stand those that every token visits.
    ids = tl.where(nth < TOP_K, ids, EXPERTS + nth - TOP_K)
    weights = tl.where(nth < TOP_K, weights * scaling, 1.0)
    if HELD > 0:
        is_here = (ids >= FIRST) & (ids < FIRST + HELD)
        ids = tl.where(is_here, ids - FIRST, -1)
        weights = tl.where(is_here, weights, 0.0)
    place = token * (TOP_K + SHARED) + nth
    tl.store(ids_p + place, ids, mask=nth < TOP_K + SHARED)
    tl.store(weights_p + place, weights, mask=nth < TOP_K + SHARED)


@triton.jit
def _goes_first(count, expert, of_count, of_expert):
    """Whether an expert's blocks stand before those of another: with more rows, so that what takes
    longest does not begin last."""
    return (count > of_count) | ((count == of_count) & (expert < of_expert))


@triton.jit(do_not_specialize=["num_slots", "max_blocks"])
def _align(
    ids_p, order_p, experts_p, places_p, num_slots, max_blocks,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr, PAD_BM: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per expert: where its rows stand in the order, and which."""
    join_chain(PDL)
    mine = tl.program_id(0)
    expert = tl.arange(0, PAD)
    counts = tl.zeros((PAD,), tl.int32)
    for begin in range(0, num_slots, BLOCK):
        slots = begin + tl.arange(0, BLOCK)
        ids = tl.load(ids_p + slots, mask=slots < num_slots, other=-1).to(tl.int32)
        counts += tl.histogram(tl.maximum(ids, 0), PAD, mask=ids >= 0)
    blocks = (counts + BM - 1) // BM
    count = tl.sum(tl.where(expert == mine, counts, 0), 0)
    first = tl.sum(tl.where(_goes_first(counts, expert, count, mine), blocks, 0), 0)
    own = (count + BM - 1) // BM
    done = tl.zeros((), tl.int32)
    for begin in range(0, num_slots, BLOCK):
        slots = begin + tl.arange(0, BLOCK)
        ids = tl.load(ids_p + slots, mask=slots < num_slots, other=-1).to(tl.int32)
        match = (ids == mine).to(tl.int32)
        place = first * BM + done + tl.cumsum(match, 0) - match
        tl.store(order_p + place, slots, mask=match == 1)
        tl.store(places_p + slots, place, mask=match == 1)
        done += tl.sum(match, 0)
    # The rest of the last block is padding.
    place = done + tl.arange(0, PAD_BM)
    tl.store(order_p + first * BM + place, num_slots, mask=place < own * BM)
    for block in range(first, first + own):
        tl.store(experts_p + block, mine)
    if mine == EXPERTS - 1:
        for begin in range(0, num_slots, BLOCK):
            slots = begin + tl.arange(0, BLOCK)
            ids = tl.load(ids_p + slots, mask=slots < num_slots, other=0).to(tl.int32)
            tl.store(places_p + slots, ids * 0 - 1, mask=ids < 0)
        for begin in range(tl.sum(blocks, 0), max_blocks, BLOCK):
            unused = begin + tl.arange(0, BLOCK)
            tl.store(experts_p + unused, -1, mask=unused < max_blocks)


@triton.jit(do_not_specialize=["num_slots"])
def _count(ids_p, counts_p, num_slots, PAD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    join_chain(PDL)
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_p + slots, mask=slots < num_slots, other=-1).to(tl.int32)
    counts = tl.histogram(tl.maximum(ids, 0), PAD, mask=ids >= 0)
    tl.atomic_add(counts_p + tl.arange(0, PAD), counts, mask=counts > 0)


@triton.jit(do_not_specialize=["num_slots", "max_blocks"])
def _place(
    ids_p, counts_p, order_p, experts_p, places_p, num_slots, max_blocks,
    PAD: tl.constexpr, BM: tl.constexpr, PAD_BM: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs take places of an expert as they come. Which row of a block a token gets decides
    nothing about its result. Those after the last slots say whose the blocks are."""
    join_chain(PDL)
    expert = tl.arange(0, PAD)
    counts = tl.load(counts_p + expert)
    blocks = (counts + BM - 1) // BM
    if PAD <= _MOST_SORTED:
        is_first = _goes_first(counts[None, :], expert[None, :], counts[:, None], expert[:, None])
        first_blocks = tl.sum(tl.where(is_first, blocks[None, :], 0), 1)
    else:
        first_blocks = tl.cumsum(blocks, 0) - blocks
    starts, ends = first_blocks * BM, first_blocks + blocks
    own_programs = tl.cdiv(num_slots, BLOCK)
    if tl.program_id(0) < own_programs:
        slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = slots < num_slots
        ids = tl.load(ids_p + slots, mask=inside, other=-1).to(tl.int32)
        is_own = (ids[:, None] == expert[None, :]).to(tl.int32)
        own = tl.sum(is_own, 0)
        first = starts + tl.atomic_add(counts_p + PAD + expert, own, mask=own > 0)
        place = first[None, :] + tl.cumsum(is_own, 0) - is_own
        own_place = tl.sum(is_own * place, 1)
        tl.store(order_p + own_place, slots, mask=ids >= 0)
        tl.store(places_p + slots, tl.where(ids >= 0, own_place, -1), mask=inside)
    else:
        block = (tl.program_id(0) - own_programs) * BLOCK + tl.arange(0, BLOCK)
        has_it = (first_blocks[None, :] <= block[:, None]) & (block[:, None] < ends[None, :])
        of_block = tl.max(tl.where(has_it, expert[None, :], -1), 1)
        tl.store(experts_p + block, of_block, mask=block < max_blocks)
        if tl.program_id(0) == own_programs:
            # The rest of each expert's last block is padding.
            rest = (starts + counts)[:, None] + tl.arange(0, PAD_BM)[None, :]
            tl.store(order_p + rest, num_slots + rest * 0, mask=rest < (ends * BM)[:, None])


@dataclass(frozen=True, slots=True)
class Order:
    """Assignments (token * top_k + nth) by expert, each expert's from a new block of rows on."""

    slots: torch.Tensor  # [blocks * BM] int32; the number of assignments where there is none
    experts: torch.Tensor  # [blocks] expert of each block; -1: nothing is left
    places: torch.Tensor | None = None  # [assignments] int32 where each stands; -1: nowhere
    is_alone: bool = False  # every assignment is a block of its own: `slots` is not needed


def moe_routing(
    router_logits: torch.Tensor, correction_bias: torch.Tensor | None, spec: RoutingSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_ids [T, k] int64, topk_weights [T, k] float32), computed in float32 from logits of any
    dtype. Batch-invariant; ids are valid whatever the logits hold."""
    return route(router_logits, correction_bias, spec, 0)


def route(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    spec: RoutingSpec,
    num_shared: int,
    held: tuple[int, int] = (0, 0),
) -> tuple[torch.Tensor, torch.Tensor]:
    """moe_routing, and after each token's choice the experts that all visit, [T, k + num_shared].
    router_logits may be parts of sums, [parts, T, E]. `held`: (first, count) of the experts that
    are here; ids are places among these then, those elsewhere -1 with weight 0."""
    tokens, experts = router_logits.shape[-2:]
    parts = router_logits.shape[0] if router_logits.ndim == 3 else 1
    router_logits = router_logits if router_logits.stride(-1) == 1 else router_logits.contiguous()
    shape, device = (tokens, spec.top_k + num_shared), router_logits.device
    ids = torch.empty(shape, dtype=torch.int64, device=device)
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    if tokens:
        size = pad2(experts // spec.num_groups)
        _route[(tokens,)](
            router_logits, router_logits if correction_bias is None else correction_bias,
            ids, weights, router_logits.stride(-2), router_logits.stride(0),
            _SOFTMAX_FLOOR if spec.scoring == "softmax" else _SIGMOID_FLOOR,
            float(spec.scaling_factor), PARTS=parts, EXPERTS=experts, GROUPS=spec.num_groups,
            OPEN=spec.top_k_groups, TOP_K=spec.top_k, SIGMOID=spec.scoring == "sigmoid",
            RENORMALIZE=spec.renormalize, HAS_BIAS=correction_bias is not None, SHARED=num_shared,
            FIRST=held[0], HELD=held[1],
            PAD_GROUPS=pad2(spec.num_groups), PAD_SIZE=size, PAD_K=pad2(spec.top_k + num_shared),
            **options(num_warps=1),
        )  # fmt: skip
    return ids, weights


def with_shared(
    ids: torch.Tensor, weights: torch.Tensor, num_experts: int, num_shared: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A given routing with the experts that all visit after it."""
    shape = (ids.shape[0], num_shared)
    shared = torch.arange(num_experts, num_experts + num_shared, device=ids.device).expand(shape)
    ones = torch.ones(shape, dtype=weights.dtype, device=weights.device)
    return torch.cat([ids, shared], 1), torch.cat([weights, ones], 1)


def order_by_expert(ids: torch.Tensor, num_experts: int, rows: int) -> Order:
    """The order for blocks of `rows` rows, without assignments to -1. Sizes depend on the shape of
    ids alone: nothing is waited for."""
    ids, num_slots = ids.contiguous(), ids.numel()
    blocks = min(num_slots, num_experts) + max(0, num_slots - num_experts) // rows
    if num_slots > _FEW_SLOTS:
        return _counted_order(ids, num_experts, rows, blocks)
    slots = torch.empty(blocks * rows, dtype=torch.int32, device=ids.device)
    experts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    places = torch.empty(num_slots, dtype=torch.int32, device=ids.device)
    _align[(num_experts,)](
        ids, slots, experts, places, num_slots, blocks, EXPERTS=num_experts, PAD=pad2(num_experts),
        BM=rows, PAD_BM=pad2(rows), BLOCK=min(1024, max(64, pad2(num_slots))),
        **options(num_warps=4),
    )  # fmt: skip
    return Order(slots, experts, places)


def _counted_order(ids: torch.Tensor, num_experts: int, rows: int, blocks: int) -> Order:
    num_slots, pad = ids.numel(), pad2(num_experts)
    slots = torch.empty(blocks * rows, dtype=torch.int32, device=ids.device)
    experts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    places = torch.empty(num_slots, dtype=torch.int32, device=ids.device)
    counts = torch.zeros((2, pad), dtype=torch.int32, device=ids.device)
    _count[(cdiv(num_slots, 1024),)](
        ids, counts, num_slots, PAD=pad, BLOCK=1024, **options(num_warps=4)
    )
    _place[(cdiv(num_slots, 128) + cdiv(blocks, 128),)](
        ids, counts, slots, experts, places, num_slots, blocks, PAD=pad,
        BM=rows, PAD_BM=pad2(rows), BLOCK=128, **options(num_warps=8),
    )  # fmt: skip
    return Order(slots, experts, places)
