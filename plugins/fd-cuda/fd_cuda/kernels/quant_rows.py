"""Products with int8 and fp8 weights that lie row by row, in Triton: what is stored is multiplied
with rounded activations, rows grouped by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from .common import INTERPRETED, join_chain, options
from .quant_layout import INT8_ROWS, Slabs
from .quant_round import FP8_BLOCK
from .routing import Order

if TYPE_CHECKING:
    from .quant_weights import Weights


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


def tiles_for(each: float) -> Tiles:
    """For so many rows an expert."""
    if INTERPRETED:
        return _SMALL
    return _MANY if each > 64 else _SOME


@triton.jit(do_not_specialize=["num_slots"])
def _grouped_rows(
    x_p, x_scales_p, w_p, scales_p, blocks_p, y_p, slots_p, experts_p, num_slots, width, depth,
    blocks, scale_width, block_rows, block_columns, x_scale_rows,
    DIVISOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BY_BLOCK: tl.constexpr, IS_INT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of one block of one expert times BN of its outputs. BY_BLOCK: x_scales_p [K / BK, T] and
    blocks_p [E, N / 128, K / BK]; else x_scales_p [T] and scales_p [E, scale_width]."""
    join_chain(PDL)
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks
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


def multiply_rows(
    x: torch.Tensor,
    weight: Weights,
    slabs: Slabs,
    order: Order,
    tiles: Tiles,
    num_slots: int,
    divisor: int,
) -> torch.Tensor:
    """[num_slots, N]: row x[slot // divisor], rounded, times the weight of the slot's expert."""
    is_int, by_block = slabs.kind == INT8_ROWS, weight.rounding == "block"
    stored = slabs.data.view(torch.int8 if is_int else torch.float8_e4m3fn)
    numbers, scales = weight.numbers(x)
    width, depth = slabs.out_features, slabs.in_features
    blocks = slabs.scales if slabs.block_scales is None else slabs.block_scales
    y = torch.empty((num_slots, width), dtype=x.dtype, device=x.device)
    across = triton.cdiv(width, tiles.columns)
    _grouped_rows[(len(order.experts) * across,)](
        numbers, scales, stored, slabs.scales, blocks, y, order.slots, order.experts, num_slots,
        width, depth, len(order.experts), slabs.scales.shape[-1], blocks.shape[-2],
        blocks.shape[-1], x.shape[0],
        DIVISOR=divisor, BM=tiles.rows, BN=tiles.columns, BK=FP8_BLOCK, BY_BLOCK=by_block,
        IS_INT=is_int, **options(num_warps=tiles.warps, num_stages=tiles.stages),
    )  # fmt: skip
    return y
