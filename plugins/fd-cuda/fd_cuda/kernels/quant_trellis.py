"""Products with the trellis code of two bits: `linear_tet2`, `moe_experts_tet2` (fd-quant-wint2's
format).

Inputs are rotated and rounded to int8, then multiplied with the code as it is stored
(trellis_native.py). Experts of one layer share a rotation. Many rows of small layers: weights are
decoded for the call and multiplied as half floats. Elsewhere (no Hopper GPU, float32) the format's
own definition serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F

from .common import batch_invariant, num_processors
from .experts import combined
from .quant_grouped import grouped_shape
from .quant_layout import TRELLIS
from .quant_linear import fills, native_runs, size_of, tile_shape
from .quant_shapes import Grouped, Tile
from .routing import order_by_expert
from .trellis_native import (
    TILE,
    TURN,
    Gemv,
    Trellis,
    by_lanes,
    decoded,
    grouped_experts,
    product,
    rotate,
    rotated,
    tile_product,
)

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight

_ALONE: Final = 2  # tokens whose assignments are blocks of their own
_FEW: Final = 8  # rows an expert up to which tet_gemv.cu is faster, eight at a time
_SOME: Final = 24  # rows an expert from which weights are decoded, to one number instead of two
_MANY: Final = 40  # rows an expert from which blocks have 128: experts with more than most, too
_SHORT: Final = 64  # turns up to which rows are short
_SOME_ROWS: Final = 32  # of a dense layer, up to which tet_gemv.cu is faster


def prepare(weight: PackedWeight) -> Trellis:
    """Whole tiles and turns are what the kernels can read."""
    held = weight.tensors
    signs, blocks = held["signs"], held["block"].reshape(-1)
    is_shared = True
    if weight.num_experts:
        is_shared = bool((signs == signs[0]).all()) and bool((blocks == blocks[0]).all())
        signs = signs[0]
    whole = weight.out_features % TILE == 0 and weight.in_features % TURN == 0
    packed = by_lanes(weight) if is_shared and whole else weight
    return Trellis(
        packed,
        packed.tensors["weight"].contiguous(),
        held["scale"].float().contiguous(),
        signs.contiguous(),
        int(blocks[0]),
        is_shared and whole,
    )


def linear(x: torch.Tensor, weight: Trellis, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K], rotated, times weight [N, K] transposed, plus bias."""
    rows = x.shape[0]
    if not rows:
        return torch.empty((0, weight.packed.out_features), dtype=x.dtype, device=x.device)
    if not (weight.is_native and native_runs(x)):
        seen = weight.packed.activate(x)
        y = F.linear(seen, weight.stored.dequantize())
        return (y if bias is None else y + bias.float()).to(x.dtype)
    x = x if x.stride(-1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    shape = choose(weight, rows)
    if shape is None:
        return F.linear(rotated(x, weight), decoded(weight, x.dtype), bias)
    return by_shape(shape, x, weight, bias)


def by_shape(
    shape: Gemv | Tile, x: torch.Tensor, weight: Trellis, bias: torch.Tensor | None
) -> torch.Tensor:
    """Of a dense layer, by one kernel or, where blocks do not rotate x themselves, two."""
    if isinstance(shape, Tile):
        return tile_product(shape, rotate(x, weight), x.dtype, weight, bias, x.shape[0])
    given = x if shape.rotates else rotate(x, weight)
    return product(shape, given, x.dtype, weight, x.shape[0], bias)


def choose(weight: Trellis, rows: int) -> Gemv | Tile | None:
    """For a dense layer, as measured on an H200; None for the library."""
    if rows > _SOME_ROWS and not batch_invariant():
        return _choose_tile(weight, rows)
    turns, places = weight.packed.in_features // TURN, num_processors() // weight.tiles
    if rows > 16:
        tile = _choose_tile(weight, rows) if places >= 4 and not batch_invariant() else None
        return tile or Gemv(8, 4, 1, rows=32)
    # As many blocks divide K as run at once.
    split = next(n for n in (4, 2, 1) if n <= max(1, places) and turns % n == 0)
    warps = 16 if split == 1 and turns > _SHORT else 8
    return Gemv(warps, 4, 1, 1, 8 if rows <= 8 else 16, split, rotates=rows == 1)


def _choose_tile(weight: Trellis, rows: int) -> Tile | None:
    sixteens = TILE // 16 * weight.tiles
    if weight.packed.in_features % TILE:  # quant_tile.cu's turns are longer
        return None
    size = size_of(sixteens)
    if rows > 128 and (not size or (size == 2 and not fills(sixteens, rows))):
        return None
    return tile_shape(TRELLIS, 0, sixteens, rows)


def choose_experts(weight: Trellis, rows: int, *, paired: bool, alone: bool) -> Gemv:
    """For rows of experts, alone or up to eight of each, as measured on an H200."""
    tiles = 2 if paired or weight.tiles % 2 == 0 else 1
    blocks = weight.tiles // 2 * rows
    if alone and blocks < 400:  # more warps share one
        return Gemv(16, 4, 1, 2 if paired else 1, rotates=True)
    if alone and paired:
        has_place = blocks < 4 * num_processors()  # for a second block of each
        is_even = weight.packed.in_features // TURN % 2 == 0
        return Gemv(4, 4, 4, tiles, split=2 if has_place and is_even else 1)
    return Gemv(4, 4, 4, tiles, rotates=alone)


def moe_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: Trellis,
    down: Trellis,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' gated MLPs."""
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    tokens, top_k = topk_ids.shape
    if not tokens:
        return torch.empty_like(x)
    x = x if x.stride(-1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    whole = gate_up.packed.out_features % (2 * TILE) == 0
    if not (gate_up.is_native and down.is_native and whole and native_runs(x)):
        return _one_by_one(x, topk_ids, topk_weights, gate_up, down)
    slots, experts = tokens * top_k, gate_up.packed.num_experts
    each = slots / experts
    if each > _FEW or batch_invariant():
        shape, decodes = choose_grouped(each)
        order = order_by_expert(topk_ids, experts, shape.rows)
        y = grouped_experts(shape, x, order, top_k, gate_up, down, decodes=decodes)
        return combined(y, topk_weights)
    alone = tokens <= _ALONE
    blocks = topk_ids if alone else order_by_expert(topk_ids, experts, 8)

    def multiply(x: torch.Tensor, weight: Trellis, *, paired: bool) -> torch.Tensor:
        shape = choose_experts(weight, slots, paired=paired, alone=alone)
        given = x if shape.rotates else rotate(x, weight)
        return product(shape, given, x.dtype, weight, slots, order=blocks, paired=paired)

    hidden = multiply(x, gate_up, paired=True)
    return combined(multiply(hidden, down, paired=False), topk_weights)


def choose_grouped(each: float) -> tuple[Grouped, bool]:
    """For so many rows an expert, as measured on an H200, and whether weights are decoded."""
    if each <= _SOME or batch_invariant():
        return grouped_shape(TRELLIS, 32), False
    return grouped_shape(TRELLIS, 64 if each <= _MANY else 128, rounds=True), True


def _one_by_one(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: Trellis,
    down: Trellis,
) -> torch.Tensor:
    """Expert after expert, by the format's definition."""
    tokens, top_k = topk_ids.shape
    flat = topk_ids.reshape(-1)
    y = torch.zeros((tokens * top_k, x.shape[1]), dtype=torch.float32, device=x.device)
    stored = gate_up.stored, down.stored
    for expert in torch.unique(flat).tolist():
        slots = torch.nonzero(flat == expert)[:, 0]
        first, second = (weight.expert(expert) for weight in stored)
        both = F.linear(first.activate(x[slots // top_k]), first.dequantize()).to(x.dtype)
        gate, up = both.float().chunk(2, -1)
        hidden = (F.silu(gate) * up).to(x.dtype)
        y[slots] = F.linear(second.activate(hidden), second.dequantize()).to(x.dtype).float()
    shares = topk_weights.unsqueeze(-1) * y.view(tokens, top_k, -1)
    return shares.sum(1).to(x.dtype)
