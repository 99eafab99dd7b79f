"""Experts with packed weights, `moe_experts_<format>`: two grouped products and the weighted sum.

Few rows an expert: the native kernels of quant_native.py, which pair gate and up. Many: for slabs the same with
larger tiles, for int8 and fp8 row by row a Triton kernel that multiplies what is stored. Elsewhere (no Hopper
GPU, float32) each expert that has rows is dequantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .common import INTERPRETED, batch_invariant, join_chain, options
from .experts import combined
from .norm import silu_and_mul
from .quant_layout import INT8_ROWS, Slabs
from .quant_linear import linear, native_runs
from .quant_native import Gemm, Gemv, Grouping, Shape, product
from .quant_round import FP8_BLOCK, round_blocks, round_rows
from .quant_weights import Weights
from .routing import Order, order_by_expert

# Up to so many tokens every assignment is a block of its own.
_ALONE: Final = 2


def moe_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: Weights,
    down: Weights,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' gated MLPs: x [T, H], gate_up [E, 2I, H], down [E, H, I]."""
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    tokens, top_k = topk_ids.shape
    if not tokens:
        return torch.empty_like(x)
    x = x if x.stride(-1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    first, second = gate_up.slabs, down.slabs
    if first is None or second is None or not (native_runs(x) or INTERPRETED):
        return _one_by_one(x, topk_ids, topk_weights, gate_up, down)
    shape = choose(first, tokens * top_k / first.num_experts) if native_runs(x) else None
    whole = first.out_features % 32 == 0
    if shape is None or not whole:
        if first.kind < INT8_ROWS or (x.dtype == torch.float32 and not INTERPRETED):
            return _one_by_one(x, topk_ids, topk_weights, gate_up, down)
        y = _by_triton(x, topk_ids, gate_up, down)
        return combined(y, topk_weights)
    slots = tokens * top_k
    if tokens <= _ALONE and isinstance(shape, Gemv):
        rows = [Grouping(slots, divisor, ids=topk_ids) for divisor in (top_k, 1)]
    else:
        order = order_by_expert(topk_ids, first.num_experts, shape.rows)
        rows = [Grouping(slots, divisor, order) for divisor in (top_k, 1)]
    seen, scales = gate_up.round(x)
    hidden = product(shape, seen, first, None, x_scales=scales, grouping=rows[0], paired=True)
    seen, scales = down.round(hidden)
    y = product(_for_down(shape), seen, second, None, x_scales=scales, grouping=rows[1])
    return combined(y, topk_weights)


def choose(slabs: Slabs, each: float) -> Shape | None:
    """The kernel for so many rows an expert; None for Triton's on rows."""
    if batch_invariant():
        return None if slabs.kind >= INT8_ROWS else Gemm(64, 2, 1, 4, 4)
    if each <= 6:
        return Gemv(1, 2, 8, 4, 2)
    if each <= 16:
        return Gemv(2, 2, 8, 4, 2)
    if slabs.kind >= INT8_ROWS:
        return None
    return Gemm(64, 2, 1, 4, 4) if each <= 96 else Gemm(128, 2, 1, 4, 4)


def _for_down(shape: Shape) -> Shape:
    return shape


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program of the Triton kernel computes."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_SMALL: Final = Tiles(16, 32, 128, 4, 2)  # for the interpreter
_SOME: Final = Tiles(64, 64, 128, 4, 4)
_MANY: Final = Tiles(128, 128, 128, 8, 3)


@triton.jit(do_not_specialize=["num_slots"])
def _grouped_rows(
    x_p, x_scales_p, w_p, scales_p, blocks_p, y_p, slots_p, experts_p, num_slots, width, depth,
    tiles, scale_width, block_rows, block_columns, x_scale_rows,
    DIVISOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BY_BLOCK: tl.constexpr, IS_INT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of one block of one expert times BN of its outputs. BY_BLOCK: x_scales_p [K / BK, T] and blocks_p
    [E, N / 128, K / BK]; else x_scales_p [T] and scales_p [E, scale_width]."""
    join_chain(PDL)
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    expert = tl.load(experts_p + block).to(tl.int64)
    if expert >= 0:
        slots = tl.load(slots_p + block * BM + tl.arange(0, BM)).to(tl.int64)
        valid = slots < num_slots
        rows = slots // DIVISOR
        columns = tile * BN + tl.arange(0, BN)
        inside_n = columns < width
        ks = tl.arange(0, BK)
        x = x_p + rows[:, None] * depth + ks[None, :]
        w = w_p + (expert * width + tl.minimum(columns, width - 1))[None, :] * depth + ks[:, None]
        total = tl.zeros((BM, BN), tl.float32)
        sums = tl.zeros((BM, BN), tl.int32)
        for k in range(0, depth, BK):
            inside = ks < depth - k
            a = tl.load(x + k, mask=valid[:, None] & inside[None, :], other=0.0)
            b = tl.load(w + k, mask=inside[:, None], other=0.0)
            if BY_BLOCK:
                sx = tl.load(x_scales_p + (k // BK) * x_scale_rows + rows, mask=valid, other=0.0)
                at = (expert * block_rows + columns // 128) * block_columns + k // BK
                sw = tl.load(blocks_p + at, mask=inside_n, other=0.0)
                total += tl.dot(a, b) * (sx[:, None] * sw[None, :])
            elif IS_INT:
                sums = tl.dot(a, b, sums, out_dtype=tl.int32)
            else:
                total = tl.dot(a, b, total)
        if not BY_BLOCK:
            if IS_INT:
                total = sums.to(tl.float32)
            sx = tl.load(x_scales_p + rows, mask=valid, other=0.0)
            sw = tl.load(scales_p + expert * scale_width + columns, mask=inside_n, other=0.0)
            total *= sx[:, None] * sw[None, :]
        place = y_p + slots[:, None] * width + columns[None, :]
        tl.store(place, total.to(y_p.dtype.element_ty), mask=valid[:, None] & inside_n[None, :])


def _by_triton(
    x: torch.Tensor, topk_ids: torch.Tensor, gate_up: Weights, down: Weights
) -> torch.Tensor:
    first, second = gate_up.slabs, down.slabs
    assert first is not None and second is not None
    slots, top_k = topk_ids.numel(), topk_ids.shape[1]
    tiles = _MANY if slots / first.num_experts > 64 else _SOME
    tiles = _SMALL if INTERPRETED else tiles
    order = order_by_expert(topk_ids, first.num_experts, tiles.rows)
    y = _multiply_rows(x, gate_up, first, order, tiles, slots, top_k)
    return _multiply_rows(silu_and_mul(y), down, second, order, tiles, slots, 1)


def _multiply_rows(
    x: torch.Tensor,
    weight: Weights,
    slabs: Slabs,
    order: Order,
    tiles: Tiles,
    num_slots: int,
    divisor: int,
) -> torch.Tensor:
    is_int, by_block = slabs.kind == INT8_ROWS, weight.rounding == "block"
    stored = slabs.data.view(torch.int8 if is_int else torch.float8_e4m3fn)
    if by_block:
        numbers, scales = round_blocks(x, scaled=False)
    else:
        numbers, scales = round_rows(x, stored.dtype, weight.input_scale, is_fp8=not is_int)
    width, depth = slabs.out_features, slabs.in_features
    blocks = slabs.scales if slabs.block_scales is None else slabs.block_scales
    y = torch.empty((num_slots, width), dtype=x.dtype, device=x.device)
    across = triton.cdiv(width, tiles.columns)
    _grouped_rows[(len(order.experts) * across,)](
        numbers, scales, stored, slabs.scales, blocks, y, order.slots, order.experts, num_slots,
        width, depth, across, slabs.scales.shape[-1], blocks.shape[-2], blocks.shape[-1], x.shape[0],
        DIVISOR=divisor, BM=tiles.rows, BN=tiles.columns, BK=FP8_BLOCK, BY_BLOCK=by_block,
        IS_INT=is_int, **options(num_warps=tiles.warps, num_stages=tiles.stages),
    )  # fmt: skip
    return y


def _one_by_one(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: Weights,
    down: Weights,
) -> torch.Tensor:
    """Expert after expert, each dequantized for its rows."""
    tokens, top_k = topk_ids.shape
    flat = topk_ids.reshape(-1)
    out = torch.zeros((tokens, x.shape[1]), dtype=torch.float32, device=x.device)
    y = torch.zeros((tokens * top_k, x.shape[1]), dtype=x.dtype, device=x.device)
    for expert in torch.unique(flat).tolist():
        slots = torch.nonzero(flat == expert)[:, 0]
        gate, up = linear(x[slots // top_k], gate_up.expert(expert), None).chunk(2, -1)
        hidden = F.silu(gate.float()) * up.float()
        y[slots] = linear(hidden.to(x.dtype), down.expert(expert), None)
    for nth in range(top_k):
        out += y[nth::top_k].float() * topk_weights[:, nth, None]
    return out.to(x.dtype)
