"""Products of many rows with their activation: experts and dense gates of prompts, on the tensor
copy engine.

Weights arrive by the copy engine, and so do rows that lie in order; rows of tokens that chose an
expert are gathered. What the first product makes lies in the order of the blocks, so the second
reads it in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .common import INTERPRETED, cdiv, join_chain, options
from .quant_mxfp4 import clamped as clamped_pairs
from .routing import Order

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight

ROWS: Final = 128
DEPTH: Final = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Columns of a tile (of the gated product: pairs of gate and up), and how a program computes
    it."""

    columns: int
    warps: int
    stages: int


_GATED: Final = Shape(128, 8, 4)
_PLAIN: Final = Shape(256, 8, 3)
_DENSE: Final = Shape(64, 4, 3)


@triton.jit(do_not_specialize=["num_slots"])
def _product(
    x_p, x_tiles, w_tiles, bias_p, y_p, slots_p, experts_p, num_slots, width, depth, x_stride,
    tiles, alpha, limit,
    DIVISOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, DENSE: tl.constexpr, BIAS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of rows of one expert times BN of its outputs. GATED: rows slot // DIVISOR of x, to
    rows in the order of the blocks; else from these to the rows of their slots. CLAMPED: the same,
    and outputs are gate and up in turn. DENSE: slots are rows, and there is one expert. An expert's
    last block has rows in its first half alone every other time: then no more are computed."""
    join_chain(PDL)
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    HALF: tl.constexpr = BM // 2
    if DENSE:
        _tile(
            x_p, x_tiles, w_tiles, bias_p, y_p, slots_p, 0, block * BM, tile, num_slots, width,
            depth, x_stride, alpha, limit, DIVISOR, BM, BN, BK, GATED, CLAMPED, True, BIAS, True,
            STAGES,
        )  # fmt: skip
    else:
        expert = tl.load(experts_p + block).to(tl.int32)
        if expert >= 0:
            if tl.load(slots_p + block * BM + HALF) < num_slots:
                _tile(
                    x_p, x_tiles, w_tiles, bias_p, y_p, slots_p, expert, block * BM, tile,
                    num_slots, width, depth, x_stride, alpha, limit, DIVISOR, BM, BN, BK, GATED,
                    CLAMPED, False, BIAS, not (GATED or CLAMPED), STAGES,
                )  # fmt: skip
            else:
                _tile(
                    x_p, x_tiles, w_tiles, bias_p, y_p, slots_p, expert, block * BM, tile,
                    num_slots, width, depth, x_stride, alpha, limit, DIVISOR, HALF, BN, BK, GATED,
                    CLAMPED, False, BIAS, False, STAGES,
                )  # fmt: skip


@triton.jit
def _tile(
    x_p, x_tiles, w_tiles, bias_p, y_p, slots_p, expert, first, tile, num_slots, width, depth,
    x_stride, alpha, limit,
    DIVISOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, DENSE: tl.constexpr, BIAS: tl.constexpr,
    ENGINE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BM rows from the first on; ENGINE: the copy engine brings them."""
    nth = tl.arange(0, BM)
    ks = tl.arange(0, BK)
    columns = tile * BN + tl.arange(0, BN)
    FIRST: tl.constexpr = GATED or CLAMPED
    rows = (first + nth).to(tl.int64)
    slots = rows
    if not DENSE:
        slots = tl.load(slots_p + rows).to(tl.int64)
    valid = slots < num_slots
    if not ENGINE:
        # Padding rows repeat the first row; their results are not read.
        row = tl.where(valid, slots // DIVISOR, 0) if FIRST else rows
        x = x_p + row[:, None] * x_stride + ks[None, :]
    total = tl.zeros((BM, BN * 2 if GATED else BN), tl.float32)
    for k in tl.range(0, depth, BK, num_stages=STAGES):
        if ENGINE:
            a = x_tiles.load([first, k])
        else:
            a = tl.load(x + k)
        if GATED:
            # Gate and up side by side: as two products they would read a twice.
            b = w_tiles.load([expert * 2, tile * BN, k]).reshape(BN * 2, BK)
        else:
            b = w_tiles.load([expert * width + tile * BN, k])
        total = tl.dot(a, b.T, total)
    if GATED:
        gate, up = total.reshape(BM, 2, BN).permute(0, 2, 1).split()
        total = gate / (1.0 + tl.exp(-gate)) * up
    if BIAS:
        bias = tl.load(bias_p + expert * width + columns, mask=columns < width, other=0.0)
        total += bias.to(tl.float32)[None, :]
    stored = width
    if CLAMPED:
        total = clamped_pairs(total, alpha, limit, BM, BN)
        columns, stored = tile * (BN // 2) + tl.arange(0, BN // 2), width // 2
    place = rows if FIRST else slots
    mask = (valid if DENSE or not FIRST else nth < BM)[:, None] & (columns < stored)[None, :]
    y = y_p + place[:, None] * stored + columns[None, :]
    tl.store(y, total.to(y_p.dtype.element_ty), mask=mask)


def can_compute(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether the copy engine can read them, and no tile of columns reaches into the next
    expert."""
    width, depth = gate_up.shape[1] // 2, gate_up.shape[2]
    is_even = width % _GATED.columns == 0 and depth % _PLAIN.columns == 0
    return is_even and _has_engine(x) and all(_is_aligned(t) for t in (x, gate_up, down))


def can_clamp(x: torch.Tensor, *weights: PackedWeight) -> bool:
    """The same of experts that are unpacked for the call: no tile ends within a row."""
    is_even = all(weight.in_features % DEPTH == 0 for weight in weights)
    return is_even and _has_engine(x) and _is_aligned(x)


def can_gate(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """The same of dense_gated."""
    is_even = weight.shape[0] // 2 % _DENSE.columns == 0
    return is_even and _has_engine(x) and _is_aligned(x) and _is_aligned(weight)


def _has_engine(x: torch.Tensor) -> bool:
    if x.dtype not in (torch.bfloat16, torch.float16):
        return False
    return INTERPRETED or (x.is_cuda and torch.cuda.get_device_capability() >= (9, 0))


def _is_aligned(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 and x.stride(-2) % 8 == 0 and x.data_ptr() % 16 == 0


def row_tiles(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Tiles of so many rows of x [T, K]."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, DEPTH])


def gate_tiles(weight: torch.Tensor, columns: int) -> TensorDescriptor:
    """Tiles of so many rows of a gate and as many of its up, for weight [..., 2I, K]."""
    halves = weight.view(-1, weight.shape[-2] // 2, weight.shape[-1])
    return TensorDescriptor(halves, list(halves.shape), list(halves.stride()), [2, columns, DEPTH])


def gated(
    x: torch.Tensor, weight: torch.Tensor, order: Order, num_slots: int, divisor: int
) -> torch.Tensor:
    """[blocks * ROWS, I] in the order of the blocks: silu(gate) * up of rows slot // divisor of x,
    for weight [E, 2I, K]."""
    w_tiles, width = gate_tiles(weight, _GATED.columns), weight.shape[1] // 2
    y = torch.empty((len(order.experts) * ROWS, width), dtype=x.dtype, device=x.device)
    return _launch(_GATED, x, w_tiles, y, width, num_slots, order, divisor, is_gated=True)


def clamped(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    order: Order,
    num_slots: int,
    divisor: int,
    clamp: tuple[float, float],
) -> torch.Tensor:
    """[blocks * ROWS, N / 2] in the order of the blocks: of rows slot // divisor of x times weight
    [E, N, K] plus bias [E, N], gate and up in turn. `clamp`: alpha and limit of
    moe_experts_clamped."""
    w_tiles, width = row_tiles(weight.flatten(0, 1), _PLAIN.columns), weight.shape[1]
    y = torch.empty((len(order.experts) * ROWS, width // 2), dtype=x.dtype, device=x.device)
    return _launch(_PLAIN, x, w_tiles, y, width, num_slots, order, divisor, bias, clamp)


def plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Order,
    num_slots: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[num_slots, N]: rows of x, which are in the order of the blocks, times weight [E, N, K], plus
    bias [E, N]."""
    w_tiles, width = row_tiles(weight.flatten(0, 1), _PLAIN.columns), weight.shape[1]
    y = torch.empty((num_slots, width), dtype=x.dtype, device=x.device)
    return _launch(_PLAIN, x, w_tiles, y, width, num_slots, order, 1, bias)


def dense_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, I]: silu(gate) * up of x [T, K] times weight [2I, K]."""
    rows, width = x.shape[0], weight.shape[0] // 2
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    w_tiles = gate_tiles(weight, _DENSE.columns)
    return _launch(_DENSE, x, w_tiles, y, width, rows, None, 1, is_gated=True)


def _launch(
    shape: Shape,
    x: torch.Tensor,
    w_tiles: TensorDescriptor,
    y: torch.Tensor,
    width: int,
    num_slots: int,
    order: Order | None,
    divisor: int,
    bias: torch.Tensor | None = None,
    clamp: tuple[float, float] | None = None,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    gathers = order is not None and (is_gated or clamp is not None)
    x_tiles = w_tiles if gathers else row_tiles(x, ROWS)
    slots, experts = (x, x) if order is None else (order.slots, order.experts)
    blocks = cdiv(num_slots, ROWS) if order is None else len(order.experts)
    across = cdiv(width, shape.columns)
    _product[(blocks * across,)](
        x, x_tiles, w_tiles, x if bias is None else bias, y, slots, experts, num_slots, width,
        x.shape[1], x.stride(0), across, *(clamp or (0.0, 0.0)),
        DIVISOR=divisor, BM=ROWS, BN=shape.columns, BK=DEPTH, GATED=is_gated,
        CLAMPED=clamp is not None, DENSE=order is None, BIAS=bias is not None, STAGES=shape.stages,
        **options(num_warps=shape.warps),
    )  # fmt: skip
    return y
