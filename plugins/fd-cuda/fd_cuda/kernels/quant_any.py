"""Products with packed weights on cards that the native kernels are not written for, in Triton.

Weights keep the internal format (contracts/quant_formats.py) and become half floats in registers,
so that memory moves what is stored. One kernel for every format, dense or grouped by expert:
numbers times x, a scale behind the sum where an output has one, else at each number. Activations
come as the format sees them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from .common import INTERPRETED, batch_invariant, cdiv, join_chain, options

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight

    from .routing import Order

_INT4, _INT8, _UINT8, _FP8 = range(4)
_FP8_BLOCK: Final = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program computes. No choice needs more than 99 KiB of shared memory."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_FEW: Final = Tiles(16, 32, 128, 4, 4)
_SOME: Final = Tiles(32, 64, 64, 4, 4)
_MANY: Final = Tiles(128, 128, 32, 8, 3)
_WIDE: Final = Tiles(16, 32, 32, 4, 2)  # float32: four bytes each


def tiles_for(rows: float, dtype: torch.dtype) -> Tiles:
    """For so many rows, of an expert where there are some."""
    if dtype == torch.float32:
        return _WIDE
    if batch_invariant():
        return _SOME
    return _FEW if rows <= 16 else _SOME if rows <= 64 else _MANY


@triton.jit
def _numbers(raw, KIND: tl.constexpr, TO: tl.constexpr):
    """Bytes, or nibbles, as numbers without scales; both kinds of half floats hold them all."""
    if KIND == 0:
        return raw.to(TO)
    if KIND == 1:
        return raw.to(tl.int8, bitcast=True).to(TO)
    if KIND == 2:
        return raw.to(TO)
    # fp8: float16 has the same layout with one bit more of exponent, 8 more in its bias.
    bits = ((raw & 0x80).to(tl.uint16) << 8) | ((raw & 0x7F).to(tl.uint16) << 7)
    return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(TO)


@triton.jit(do_not_specialize=["num_slots"])
def packed_product(
    x_p, w_p, scales_p, zeros_p, bias_p, y_p, slots_p, experts_p, num_slots, width, depth, x_stride,
    w_stride, groups, scale_rows, across,
    KIND: tl.constexpr, GROUP: tl.constexpr, BY_BLOCK: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, EXPERTS: tl.constexpr, DIVISOR: tl.constexpr, OFFSET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows * across). GROUP: inputs that share a scale of an output; 0: all.
    BY_BLOCK: scales are of blocks of 128 outputs and 128 inputs. ZERO: groups have zero points,
    else OFFSET is taken off. EXPERTS: rows are assignments, see routing.Order."""
    join_chain(PDL)
    block, tile = tl.program_id(0) // across, tl.program_id(0) % across
    slots, expert = (block * BM + tl.arange(0, BM)).to(tl.int64), tl.zeros((), tl.int64)
    if EXPERTS:
        expert = tl.load(experts_p + block).to(tl.int64)
        slots = tl.load(slots_p + slots).to(tl.int64)
    if expert >= 0:
        valid = slots < num_slots
        columns = tile * BN + tl.arange(0, BN)
        inside_n, ks = columns < width, tl.arange(0, BK)
        x = x_p + (slots // DIVISOR)[:, None] * x_stride
        outputs = expert * width + columns
        w = w_p + outputs[:, None] * w_stride
        scale_of = (expert * scale_rows + (columns // 128 if BY_BLOCK else columns)) * groups
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, depth, BK):
            at = k + ks
            inside = at < depth
            a = tl.load(x + at[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
            if KIND == 0:
                pairs = k // 2 + tl.arange(0, BK // 2)
                has = inside_n[:, None] & (pairs * 2 < depth)[None, :]
                raw = tl.load(w + pairs[None, :], mask=has, other=0)
                raw = tl.interleave(raw & 15, raw >> 4)
            else:
                has = inside_n[:, None] & inside[None, :]
                raw = tl.load(w + at[None, :], mask=has, other=0)
            of = scale_of[:, None] + (at // (GROUP if GROUP else 1 << 30))[None, :]
            scaled = inside_n[:, None] & inside[None, :]
            if ZERO:
                b = _numbers(raw, KIND, tl.float32)
                b -= tl.load(zeros_p + of, mask=scaled, other=0).to(tl.float32)
            else:
                b = _numbers(raw, KIND, tl.float32) - OFFSET
            if GROUP > 0:
                b *= tl.load(scales_p + of, mask=scaled, other=0.0).to(tl.float32)
            total = tl.dot(a, tl.trans(b.to(a.dtype)), total, input_precision=PRECISION)
        if GROUP == 0:
            scale = tl.load(scales_p + scale_of, mask=inside_n, other=0.0).to(tl.float32)
            total *= scale[None, :]
        if BIAS:
            bias = tl.load(bias_p + columns, mask=inside_n, other=0.0).to(tl.float32)
            total += bias[None, :]
        place = y_p + slots[:, None] * width + columns[None, :]
        tl.store(place, total.to(y_p.dtype.element_ty), mask=valid[:, None] & inside_n[None, :])


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K], as the format sees it, times weight [N, K] transposed, plus bias."""
    tiles = tiles_for(x.shape[0], x.dtype)
    return _launch(x, weight, bias, tiles, cdiv(x.shape[0], tiles.rows), x.shape[0], None, 1)


def grouped(
    x: torch.Tensor, weight: PackedWeight, order: Order, tiles: Tiles, num_slots: int, divisor: int
) -> torch.Tensor:
    """[num_slots, N]: row x[slot // divisor] times the weight of the slot's expert."""
    return _launch(x, weight, None, tiles, len(order.experts), num_slots, order, divisor)


def _launch(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    tiles: Tiles,
    blocks: int,
    rows: int,
    order: Order | None,
    divisor: int,
) -> torch.Tensor:
    held, width, depth = weight.tensors, weight.out_features, weight.in_features
    stored, scale, zero = held["weight"], held["scale"], held.get("zero")
    by_block = weight.format.name == "block_fp8"
    group = _FP8_BLOCK if by_block else weight.group_size if scale.shape[-1] > 1 else 0
    if zero is not None and not group:
        group = depth
    kind = _kind(weight)
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    across = cdiv(width, tiles.columns)
    slots, experts = (x, x) if order is None else (order.slots, order.experts)
    packed_product[(blocks * across,)](
        x, stored.view(torch.uint8), scale, scale if zero is None else zero,
        x if bias is None else bias, y, slots, experts, rows, width, depth, x.stride(0),
        stored.shape[-1], scale.shape[-1], scale.shape[-2], across,
        KIND=kind, GROUP=group, BY_BLOCK=by_block, ZERO=zero is not None, BIAS=bias is not None,
        EXPERTS=order is not None, DIVISOR=divisor, OFFSET=8 if kind == _INT4 else 0,
        BM=tiles.rows, BN=tiles.columns, BK=tiles.depth,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **options(num_warps=tiles.warps, num_stages=1 if INTERPRETED else tiles.stages),
    )  # fmt: skip
    return y


def _kind(weight: PackedWeight) -> Any:
    stored = weight.tensors["weight"].dtype
    if stored == torch.int8:
        return _INT8
    if stored == torch.uint8:
        return _INT4 if "4" in weight.format.name.partition("a")[0] else _UINT8
    return _FP8
