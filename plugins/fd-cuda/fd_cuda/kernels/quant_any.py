"""Products with packed weights in Triton: on cards that the native kernels are not written for, and
what those do not have (MXFP4, clamped experts with biases).

Weights keep the internal format (contracts/quant_formats.py) and become half floats in registers,
so that memory moves what is stored. One kernel for every format, dense or grouped by expert:
numbers times x, a scale after the sum where an output has one, else at each number. Activations
come as the format sees them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from . import many_rows, native, quant_grouped
from .common import INTERPRETED, batch_invariant, cdiv, join_chain, options
from .experts import combined
from .quant_layout import MXFP4
from .quant_mxfp4 import clamped, is_whole, scaled_mxfp4, unpacked
from .routing import Order, order_by_expert

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight

_INT4, _INT8, _UINT8, _FP8, _MXFP4, _PLAIN = range(6)
_FP8_BLOCK: Final = 128
# Up to so many tokens every assignment is a block of its own.
_ALONE: Final = 2


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program computes. No choice but UNPACKED needs more than 99 KiB of shared
    memory."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_FEW: Final = Tiles(16, 32, 128, 4, 4)
_SOME: Final = Tiles(32, 64, 64, 4, 4)
_MANY: Final = Tiles(128, 128, 32, 8, 3)
_WIDE: Final = Tiles(16, 32, 32, 4, 2)  # float32: four bytes each
# Of clamped experts, by the most rows of one; measured on an H200 with gpt-oss-20b's in MXFP4.
CLAMPED: Final = (
    (0.5, Tiles(16, 32, 64, 4, 5)),
    (16.0, Tiles(16, 128, 64, 4, 4)),
    (64.0, Tiles(64, 128, 64, 4, 3)),
    (math.inf, Tiles(128, 128, 64, 8, 3)),
)
# Rows an expert to which quant_grouped.cu is faster.
GROUPED_TO: Final = 64
# Those to which its blocks of 32 rows are.
_FEW_EACH: Final = 12
# Rows an expert from which MXFP4 is unpacked for the call, for the products of many_rows.py.
UNPACKED_FROM: Final = 384
_MOST_UNPACKED: Final = 1 << 30  # numbers of all experts' gates and ups, or downs


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
    w_stride, groups, scale_rows, across, alpha, limit,
    KIND: tl.constexpr, GROUP: tl.constexpr, BY_BLOCK: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, EXPERTS: tl.constexpr, ALONE: tl.constexpr, DIVISOR: tl.constexpr,
    OFFSET: tl.constexpr, CLAMPED: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows * across). GROUP: inputs that share a scale of an output; 0: all.
    BY_BLOCK: scales are of blocks of 128 outputs and 128 inputs. ZERO: groups have zero points,
    else OFFSET is taken off. EXPERTS: rows are assignments, see routing.Order; ALONE: each is a
    block. CLAMPED: outputs are gate and up in turn, and half as many are stored. EVEN: BK divides
    depth."""
    join_chain(PDL)
    block, tile = tl.program_id(0) // across, tl.program_id(0) % across
    slots, expert = (block * BM + tl.arange(0, BM)).to(tl.int64), tl.zeros((), tl.int64)
    if EXPERTS:
        expert = tl.load(experts_p + block).to(tl.int64)
        if ALONE:
            slots = tl.where(tl.arange(0, BM) == 0, block, num_slots).to(tl.int64)
        else:
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
            inside = (at < depth) | EVEN
            a = tl.load(x + at[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
            has = inside_n[:, None] & inside[None, :]
            if KIND == 0 or KIND == 4:
                pairs = k // 2 + tl.arange(0, BK // 2)
                has_pair = inside_n[:, None] & ((pairs * 2 < depth) | EVEN)[None, :]
                raw = tl.load(w + pairs[None, :], mask=has_pair, other=0)
                raw = tl.interleave(raw & 15, raw >> 4)
            else:
                raw = tl.load(w + at[None, :], mask=has, other=0)
            if KIND == 4:
                nth = k // 32 + tl.arange(0, BK // 32)
                has_scale = inside_n[:, None] & ((nth < groups) | EVEN)[None, :]
                scales = tl.load(
                    scales_p + scale_of[:, None] + nth[None, :], mask=has_scale, other=0
                )
                b = scaled_mxfp4(raw, scales, BN, BK)
            elif KIND == 5:
                b = raw
            else:
                of = scale_of[:, None] + (at // (GROUP if GROUP else 1 << 30))[None, :]
                b = _numbers(raw, KIND, tl.float32)
                if ZERO:
                    b -= tl.load(zeros_p + of, mask=has, other=0).to(tl.float32)
                else:
                    b -= OFFSET
                if GROUP > 0:
                    b *= tl.load(scales_p + of, mask=has, other=0.0).to(tl.float32)
            total = tl.dot(a, tl.trans(b.to(a.dtype)), total, input_precision=PRECISION)
        if GROUP == 0 and KIND < 4:
            scale = tl.load(scales_p + scale_of, mask=inside_n, other=0.0).to(tl.float32)
            total *= scale[None, :]
        if BIAS:
            bias = tl.load(bias_p + outputs, mask=inside_n, other=0.0).to(tl.float32)
            total += bias[None, :]
        stored = width
        if CLAMPED:
            total = clamped(total, alpha, limit, BM, BN)
            columns, stored = tile * (BN // 2) + tl.arange(0, BN // 2), width // 2
        place = y_p + slots[:, None] * stored + columns[None, :]
        inside_y = valid[:, None] & (columns < stored)[None, :]
        tl.store(place, total.to(y_p.dtype.element_ty), mask=inside_y)


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K], as the format sees it, times weight [N, K] transposed, plus bias."""
    tiles = tiles_for(x.shape[0], x.dtype)
    return _launch(x, weight, bias, tiles, cdiv(x.shape[0], tiles.rows), x.shape[0], None, 1)


def grouped(
    x: torch.Tensor,
    weight: PackedWeight | torch.Tensor,
    order: Order,
    tiles: Tiles,
    num_slots: int,
    divisor: int,
    bias: torch.Tensor | None = None,
    clamp: tuple[float, float] | None = None,
) -> torch.Tensor:
    """[num_slots, N]: row x[slot // divisor] times the weight [E, N, K] of the slot's expert, plus
    its bias [E, N]. `clamp`: alpha and limit of moe_experts_clamped; then [num_slots, N / 2]."""
    blocks = len(order.experts)
    return _launch(x, weight, bias, tiles, blocks, num_slots, order, divisor, clamp)


def moe_experts_clamped(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: PackedWeight | torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: PackedWeight | torch.Tensor,
    down_bias: torch.Tensor | None,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Experts of gpt-oss, as fd-models defines them; matrices are plain or in MXFP4."""
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    tokens, top_k = topk_ids.shape
    slots, num_experts = topk_ids.numel(), gate_up_bias.shape[0]
    if not tokens:
        return torch.empty_like(x)
    each, clamp, is_free = slots / num_experts, (alpha, limit), not batch_invariant()
    if is_free and is_whole(gate_up) and is_whole(down):
        if each <= GROUPED_TO and _is_grouped(x, gate_up, down):
            shape = quant_grouped.grouped_shape(MXFP4, 32 if each <= _FEW_EACH else 64)
            order = order_by_expert(topk_ids, num_experts, shape.rows)
            own = (gate_up, gate_up_bias), (down, down_bias)
            y = quant_grouped.clamped_experts(shape, x, order, slots, top_k, *own, clamp)
            return combined(y, topk_weights)
        if each >= UNPACKED_FROM and _may_unpack(x, gate_up, down):
            order = order_by_expert(topk_ids, num_experts, many_rows.ROWS)
            wide = unpacked(gate_up, x.dtype)
            hidden = many_rows.clamped(x, wide, gate_up_bias, order, slots, top_k, clamp)
            y = many_rows.plain(hidden, unpacked(down, x.dtype), order, slots, down_bias)
            return combined(y, topk_weights)
    tiles = tiles_for(each, x.dtype)
    if x.dtype != torch.float32 and is_free:
        tiles = next(tiles for most, tiles in CLAMPED if each <= most)
    if tokens <= _ALONE and is_free:
        order = Order(topk_ids, topk_ids.view(-1), is_alone=True)
    else:
        order = order_by_expert(topk_ids, num_experts, tiles.rows)
    hidden = grouped(x, gate_up, order, tiles, slots, top_k, gate_up_bias, clamp)
    return combined(grouped(hidden, down, order, tiles, slots, 1, down_bias), topk_weights)


def _may_unpack(x: torch.Tensor, *weights: PackedWeight) -> bool:
    """Whether they fit unpacked beside what else is in memory, and many_rows.py can read what they
    become."""
    few = all(2 * weight.tensors["weight"].numel() <= _MOST_UNPACKED for weight in weights)
    return few and many_rows.can_clamp(x, *weights)


def _is_grouped(x: torch.Tensor, *weights: PackedWeight) -> bool:
    """Whether quant_grouped.cu reads them."""
    return x.dtype == torch.bfloat16 and all("powers" in weight.tensors for weight in weights)


def prepare(weight: PackedWeight | torch.Tensor) -> PackedWeight | torch.Tensor:
    """For moe_experts_clamped, which reads the internal format, with scales as quant_grouped.cu
    wants them where it runs, and plain matrices row by row."""
    if isinstance(weight, torch.Tensor):
        return weight.contiguous()
    reads = weight.dtype in ("", "bfloat16") and weight.out_features % 4 == 0
    if reads and is_whole(weight) and native.available() and native.has_wgmma():
        return quant_grouped.prepare_mxfp4(weight)
    return weight


def _launch(
    x: torch.Tensor,
    weight: PackedWeight | torch.Tensor,
    bias: torch.Tensor | None,
    tiles: Tiles,
    blocks: int,
    rows: int,
    order: Order | None,
    divisor: int,
    clamp: tuple[float, float] | None = None,
) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        width, depth = weight.shape[-2:]
        stored, scale, zero, kind, group, by_block = weight, weight, None, _PLAIN, 0, False
    else:
        held, width, depth = weight.tensors, weight.out_features, weight.in_features
        stored, scale, zero = held["weight"].view(torch.uint8), held["scale"], held.get("zero")
        by_block, kind = weight.format.name == "block_fp8", _kind(weight)
        group = _FP8_BLOCK if by_block else weight.group_size if scale.shape[-1] > 1 else 0
        if zero is not None and not group:
            group = depth
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty((rows, width // (2 if clamp else 1)), dtype=x.dtype, device=x.device)
    across = cdiv(width, tiles.columns)
    slots, experts = (x, x) if order is None else (order.slots, order.experts)
    packed_product[(blocks * across,)](
        x, stored, scale, scale if zero is None else zero,
        x if bias is None else bias, y, slots, experts, rows, width, depth, x.stride(0),
        stored.shape[-1], scale.shape[-1], scale.shape[-2], across, *(clamp or (0.0, 0.0)),
        KIND=kind, GROUP=group, BY_BLOCK=by_block, ZERO=zero is not None, BIAS=bias is not None,
        EXPERTS=order is not None, ALONE=order is not None and order.is_alone, DIVISOR=divisor,
        OFFSET=8 if kind == _INT4 else 0, CLAMPED=clamp is not None,
        EVEN=depth % tiles.depth == 0,
        BM=tiles.rows, BN=tiles.columns, BK=tiles.depth,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **options(num_warps=tiles.warps, num_stages=1 if INTERPRETED else tiles.stages),
    )  # fmt: skip
    return y


def _kind(weight: PackedWeight) -> Any:
    stored = weight.tensors["weight"].dtype
    if weight.format.name == "mxfp4":
        return _MXFP4
    if stored == torch.int8:
        return _INT8
    if stored == torch.uint8:
        return _INT4 if "4" in weight.format.name.partition("a")[0] else _UINT8
    return _FP8
