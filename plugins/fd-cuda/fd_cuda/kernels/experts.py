"""What the chosen experts compute: a grouped product over assignments ordered by expert, twice, and
the weighted sum of each token's results.

Tiles were measured on an H200 for 64 experts of 2560 x 1536 and 128 of 2048 x 768; which are
fastest depends on how many rows an expert gets. Prompts take the kernels of many_rows.py; torch's
grouped product is slower. Sums over a token's experts are taken in the order of topk_ids, so
results do not change from run to run. Quantized experts take the place of `moe_experts` in the
table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from . import many_rows
from .common import INTERPRETED, batch_invariant, cdiv, join_chain, options, pad2
from .linear import gated_linear, linear_add
from .routing import Order, order_by_expert


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program computes: so many rows times so many columns, `depth` of K at a time.
    Columns of the first product are pairs of gate and up."""

    rows: int
    columns: int
    down_columns: int
    depth: int
    warps: int
    stages: int


_EXACT: Final = Tiles(16, 32, 32, 32, 4, 2)  # float32, without shortened mantissas
_ONE_ROW: Final = Tiles(16, 32, 64, 128, 4, 4)
_FEW_ROWS: Final = Tiles(32, 64, 64, 128, 4, 3)
_SOME_ROWS: Final = Tiles(64, 64, 128, 64, 4, 4)
_MANY_ROWS: Final = Tiles(128, 128, 256, 64, 8, 3)
# Up to so many tokens every assignment is a block of its own: hardly two share an expert, and
# finding that out would take a kernel.
_ALONE: Final = 2


def tiles_for(tokens: int, top_k: float, num_experts: int, dtype: torch.dtype) -> Tiles:
    """The fastest tiles for so many rows an expert."""
    if dtype == torch.float32 or INTERPRETED:
        return _EXACT
    if batch_invariant():
        return _SOME_ROWS
    each = tokens * top_k / num_experts
    if each <= 4:
        return _ONE_ROW
    if each <= 12:
        return _FEW_ROWS
    return _SOME_ROWS if each <= 80 else _MANY_ROWS


@triton.jit(do_not_specialize=["num_slots"])
def _grouped(
    x_p, w_p, y_p, slots_p, experts_p, num_slots, width, depth, x_stride, tiles,
    ALONE: tl.constexpr, DIVISOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows of one block of one expert times BN of its outputs; GATED: of as many gate and up rows.
    ALONE: experts_p are the ids themselves, and a block is one assignment."""
    join_chain(PDL)
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    expert = tl.load(experts_p + block).to(tl.int32)
    if expert >= 0:
        if ALONE:
            nth = tl.arange(0, BM)
            slots = tl.where(nth == 0, block, num_slots).to(tl.int64)
        else:
            slots = tl.load(slots_p + block * BM + tl.arange(0, BM)).to(tl.int64)
        valid = slots < num_slots
        columns = tile * BN + tl.arange(0, BN)
        ks = tl.arange(0, BK)
        x = x_p + (slots // DIVISOR)[:, None] * x_stride + ks[None, :]
        rows = width * 2 if GATED else width
        start = expert.to(tl.int64) * rows
        # Columns after the last repeat it; nothing of theirs is stored.
        row = start + tl.minimum(columns, width - 1)
        w = w_p + row[None, :] * depth + ks[:, None]
        total = tl.zeros((BM, BN), tl.float32)
        other = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, depth, BK, num_stages=STAGES):
            if EVEN:
                a = tl.load(x + k, mask=valid[:, None], other=0.0)
                b = tl.load(w + k)
            else:
                inside = ks < depth - k
                a = tl.load(x + k, mask=valid[:, None] & inside[None, :], other=0.0)
                b = tl.load(w + k, mask=inside[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            if GATED:
                if EVEN:
                    c = tl.load(w + k + width.to(tl.int64) * depth)
                else:
                    c = tl.load(w + k + width.to(tl.int64) * depth, mask=inside[:, None], other=0.0)
                other = tl.dot(a, c, other, input_precision=PRECISION)
        if GATED:
            total = total / (1.0 + tl.exp(-total)) * other
        mask = valid[:, None] & (columns < width)[None, :]
        place = y_p + slots[:, None] * width + columns[None, :]
        tl.store(place, total.to(y_p.dtype.element_ty), mask=mask)


@triton.jit
def _combine(
    y_p, weights_p, residual_p, out_p, width, residual_stride, TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SKIPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        row = token * TOP_K + j
        weight = tl.load(weights_p + row)
        wanted = inside
        if SKIPS:  # rows that do not count were never written
            wanted = tl.where(weight != 0, columns, width) < width
        y = tl.load(y_p + row * width + columns, mask=wanted, other=0.0)
        total += weight * y.to(tl.float32)
    if HAS_RESIDUAL:
        x = tl.load(residual_p + token * residual_stride + columns, mask=inside, other=0.0)
        total += x.to(tl.float32)
    tl.store(out_p + token * width + columns, total.to(out_p.dtype.element_ty), mask=inside)


def moe_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' gated MLPs: x [T, H], gate_up [E, 2I, H], down [E, H,
    I]."""
    return sum_of_experts(x, topk_ids, topk_weights, gate_up, down, None)


def sum_of_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor | None,
    present: float = 0.0,
) -> torch.Tensor:
    """moe_experts, and a residual [T, H]. `present`: the share of assignments that is to be
    expected where others are -1, with weight 0; 0: all are."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    tokens, top_k = topk_ids.shape
    if not tokens:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    num_slots, num_experts = topk_ids.numel(), gate_up.shape[0]
    skips = present > 0.0
    tiles = tiles_for(tokens, top_k * (present or 1.0), num_experts, x.dtype)
    if tiles is _MANY_ROWS and many_rows.can_compute(x, gate_up, down):
        order = order_by_expert(topk_ids, num_experts, many_rows.ROWS)
        hidden = many_rows.gated(x, gate_up, order, num_slots, top_k)
        y = many_rows.plain(hidden, down, order, num_slots)
        return combined(y, topk_weights, residual, skips=skips)
    if tokens <= _ALONE and not batch_invariant():
        order = Order(topk_ids, topk_ids.view(-1), is_alone=True)
    else:
        order = order_by_expert(topk_ids, num_experts, tiles.rows)
    hidden = grouped(x, gate_up, order, tiles, num_slots, top_k, gated=True)
    y = grouped(hidden, down, order, tiles, num_slots, 1, gated=False)
    return combined(y, topk_weights, residual, skips=skips)


def add_expert(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """total + one expert's gated MLP, in total's memory."""
    inner = gated_linear(x, None, 0.0, gate_up, None)
    return linear_add(inner, down, None, total)


def grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Order,
    tiles: Tiles,
    num_slots: int,
    divisor: int,
    *,
    gated: bool,
) -> torch.Tensor:
    """[num_slots, width]: row x[slot // divisor] times the weight of the slot's expert."""
    width, depth = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    y = torch.empty((num_slots, width), dtype=x.dtype, device=x.device)
    columns = tiles.columns if gated else tiles.down_columns
    across = cdiv(width, columns)
    _grouped[(len(order.experts) * across,)](
        x, weight, y, order.slots, order.experts, num_slots, width, depth, x.stride(0), across,
        ALONE=order.is_alone, DIVISOR=divisor, BM=tiles.rows, BN=columns, BK=tiles.depth,
        GATED=gated,
        EVEN=depth % tiles.depth == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        STAGES=tiles.stages, **options(num_warps=tiles.warps),
    )  # fmt: skip
    return y


def combined(
    y: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    skips: bool = False,
) -> torch.Tensor:
    """Sum over a token's experts: rows token * k + j of y times weights [T, k], and the residual.
    With `skips` rows of weight 0 may hold anything."""
    tokens, top_k = weights.shape
    width = y.shape[1]
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    block = min(1024, pad2(width))
    _combine[(tokens, cdiv(width, block))](
        y, weights, y if residual is None else residual, out, width,
        0 if residual is None else residual.stride(0), TOP_K=top_k,
        HAS_RESIDUAL=residual is not None, SKIPS=skips, BLOCK=block, **options(num_warps=4),
    )  # fmt: skip
    return out
