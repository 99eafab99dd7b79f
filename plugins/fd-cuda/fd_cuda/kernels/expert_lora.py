"""What adapters add to the products of routed experts: the operation `lora_experts` of fd-lora, and
the experts with both products apart.

Rows are pairs of a token and a chosen expert, ordered by expert (routing.py). A block of them has
one expert and mostly few adapters: a program goes through those of its rows, from the first to the
last, and leaves out the others. So nothing that was captured depends on who has which. Sums are
added in one order, so a row does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from . import quant_experts
from .adapted_rows import even, tiles_of
from .common import batch_invariant, join_chain, options, pad2
from .experts import combined, grouped, tiles_for
from .norm import silu_and_mul
from .quant_linear import native_runs
from .quant_native import Grouping, product
from .quant_shapes import Few
from .quant_weights import Weights
from .routing import order_by_expert

if TYPE_CHECKING:
    from fastdeploy_core.contracts.moe import ExpertAdapters

# Rows an expert from which a program computes so many at a time; else 16.
_SOME_EACH, _SOME = 32, 64
_COLUMNS = 128  # outputs of a program, at most
_HELD = 1 << 15  # bytes of B that a program multiplies at once


@triton.jit(do_not_specialize=["num_pairs"])
def _shrink(
    x_p, a_p, inner_p, order_p, experts_p, slots_p, num_pairs, x_stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, DIVISOR: tl.constexpr, K: tl.constexpr,
    RANKS: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """inner [pairs, RANKS] float32: A of the pair's adapter and expert times row pair / DIVISOR of
    x."""
    join_chain(PDL)
    expert = tl.load(experts_p + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        pairs = tl.load(order_p + tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
        slots = tl.load(slots_p + pairs // TOP_K, mask=pairs < num_pairs, other=-1)
        last = tl.max(slots, 0)
        if last >= 0:
            first = tl.min(tl.where(slots < 0, last, slots), 0)
            ranks = tl.arange(0, PADDED)
            x_rows = x_p + (pairs // DIVISOR)[:, None] * x_stride
            inner = tl.zeros((BM, PADDED), dtype=tl.float32)
            for slot in range(first, last + 1):
                mine = slots == slot
                if tl.max(mine.to(tl.int32), 0) > 0:
                    matrix = expert + tl.full((), EXPERTS, tl.int64) * slot
                    a_rows = a_p + matrix * (RANKS * K) + ranks[:, None] * K
                    for start in range(0, K, BK):
                        inputs = start + tl.arange(0, BK)
                        inside = (inputs < K)[None, :]
                        x_mask = mine[:, None] & inside
                        x = tl.load(x_rows + inputs[None, :], mask=x_mask, other=0.0)
                        a_mask = (ranks < RANKS)[:, None] & inside
                        a = tl.load(a_rows + inputs[None, :], mask=a_mask, other=0.0)
                        inner = tl.dot(x, tl.trans(a), inner, input_precision="ieee")
            place = inner_p + pairs[:, None] * RANKS + ranks[None, :]
            tl.store(place, inner, mask=(slots >= 0)[:, None] & (ranks < RANKS)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _expand(
    y_p, inner_p, b_p, order_p, experts_p, slots_p, tiles_p, num_pairs, y_stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    RANKS: tl.constexpr, RANK: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y with B of the pair's adapter and expert times its part of inner."""
    tile = tl.program_id(1) * 3
    part, end = tl.load(tiles_p + tile), tl.multiple_of(tl.load(tiles_p + tile + 2), EVEN)
    cols = tl.multiple_of(tl.load(tiles_p + tile + 1), EVEN) + tl.arange(0, BN)
    join_chain(PDL)
    expert = tl.load(experts_p + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        pairs = tl.load(order_p + tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
        slots = tl.load(slots_p + pairs // TOP_K, mask=pairs < num_pairs, other=-1)
        last = tl.max(slots, 0)
        if last >= 0:
            first = tl.min(tl.where(slots < 0, last, slots), 0)
            ranks = tl.arange(0, RANK)
            has = (slots >= 0)[:, None]
            sums = inner_p + pairs[:, None] * RANKS + part * R + ranks[None, :]
            inner = tl.load(sums, mask=has & (ranks < R)[None, :], other=0.0)
            target = y_p + pairs[:, None] * y_stride + cols[None, :]
            mask = has & (cols < end)[None, :]
            total = tl.load(target, mask=mask, other=0.0).to(tl.float32)
            b_mask = (cols < end)[:, None] & (ranks < R)[None, :]
            for slot in range(first, last + 1):
                mine = slots == slot
                if tl.max(mine.to(tl.int32), 0) > 0:
                    matrix = expert + tl.full((), EXPERTS, tl.int64) * slot
                    b_rows = b_p + matrix * (N * R) + cols[:, None] * R
                    b = tl.load(b_rows + ranks[None, :], mask=b_mask, other=0.0)
                    own = tl.where(mine[:, None], inner, 0.0).to(b.dtype)
                    total = tl.dot(own, tl.trans(b), total, input_precision="ieee")
            tl.store(target, total.to(y_p.dtype.element_ty), mask=mask)


def lora_experts(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    slots: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """y [T * k, N] with what adapters add to experts' products, in its memory where that is
    possible: see fd_lora.kernels."""
    num_pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    if not num_pairs:
        return y
    y = y if y.stride(1) == 1 else y.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    is_some = batch_invariant() or num_pairs >= _SOME_EACH * num_experts
    rows = _SOME if is_some else 16
    order = order_by_expert(topk_ids, num_experts, rows)
    ranks, depth, rank = a.shape[1], a.shape[2], b.shape[2]
    padded = max(16, pad2(ranks))
    # As many numbers of A as fit in shared memory beside those of x, twice.
    inputs = max(16, min(256, pad2(depth), 4096 // padded * (32 // x.element_size()) // 4))
    inner = torch.empty((num_pairs, ranks), dtype=torch.float32, device=x.device)
    blocks, sizes = len(order.experts), {"EXPERTS": num_experts, "TOP_K": top_k, "BM": rows}
    _shrink[(blocks,)](
        x, a, inner, order.slots, order.experts, slots, num_pairs, x.stride(0),
        DIVISOR=num_pairs // x.shape[0], K=depth, RANKS=ranks, PADDED=padded, BK=inputs,
        **sizes, **options(num_warps=4, num_stages=2),
    )  # fmt: skip
    wide = max(16, pad2(rank))
    fitting = min(_COLUMNS, _HELD // (wide * x.element_size()))
    columns = max(16, min(fitting, pad2(max(ends))))
    tiles, num_tiles = tiles_of(tuple(ends), columns, y.device)
    _expand[(blocks, num_tiles)](
        y, inner, b, order.slots, order.experts, slots, tiles, num_pairs, y.stride(0),
        N=y.shape[1], R=rank, RANKS=ranks, RANK=wide, EVEN=even(ends), BN=columns,
        **sizes, **options(num_warps=4),
    )  # fmt: skip
    return y


def adapted_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor | Weights,
    down: torch.Tensor | Weights,
    adapters: ExpertAdapters,
) -> torch.Tensor:
    """moe_experts with what adapters add to both products, plain or packed."""
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    if not topk_ids.numel():
        return torch.empty_like(x)
    y = adapters.gate_up(_product(x, topk_ids, gate_up, topk_ids.shape[1]), x, topk_ids)
    hidden = silu_and_mul(y)
    y = adapters.down(_product(hidden, topk_ids, down, 1), hidden, topk_ids)
    return combined(y, topk_weights)


def _product(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    weight: torch.Tensor | Weights,
    divisor: int,
) -> torch.Tensor:
    """[T * k, N]: row pair / divisor of x times the matrix of the pair's expert. Packed weights
    stay as they are where rows are few; else those of all experts are dequantized for the call."""
    num_pairs, (tokens, top_k) = topk_ids.numel(), topk_ids.shape
    x = x if x.stride(-1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    if isinstance(weight, Weights):
        slabs = weight.slabs
        if slabs is not None and native_runs(x) and not weight.rounding:
            shape = quant_experts.choose(slabs, num_pairs / slabs.num_experts)
            if isinstance(shape, Few):
                order = order_by_expert(topk_ids, slabs.num_experts, shape.rows)
                grouping = Grouping(num_pairs, divisor, order)
                return product(shape, x, slabs, None, grouping=grouping)
        x, weight = weight.seen(x), weight.dequantized(x.dtype)
    tiles = tiles_for(tokens, top_k, weight.shape[0], x.dtype)
    order = order_by_expert(topk_ids, weight.shape[0], tiles.rows)
    return grouped(x, weight, order, tiles, num_pairs, divisor, gated=False)
