"""Products with the trellis code of two bits: `linear_tet2`, `moe_experts_tet2` (fd-quant-wint2's
format).

Inputs are rotated and rounded to int8 by one kernel, then multiplied with the code as it is stored
by another (native/tet_rotate.cu; native/tet_gemv.cu for few rows, tet_gemm.cu for more rows an
expert). Experts of one layer share a rotation. Many rows: weights are decoded for the call and
multiplied as half floats. Elsewhere (no Hopper GPU, float32) the format's own definition serves.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F

from . import native
from .common import batch_invariant
from .experts import combined
from .quant_experts import by_halves, may_unpack
from .quant_linear import native_runs
from .quant_native import Grouping
from .routing import order_by_expert

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight

# What the code's numbers, whole bytes, are multiplied with: its spread over its deviation.
_UNIT: Final = 1.03 / 128.0
_TILE: Final = 64  # outputs of a strand
_TURN: Final = 32  # inputs of four strands
_ALONE: Final = 2
_FEW: Final = 12  # rows an expert up to which tet_gemv.cu is faster, eight at a time
_STAGES: Final = 5  # tiles of x in shared memory, tet_gemm.cu
_MANY_EACH: Final = 192  # rows an expert from which decoding all of them pays
_MANY: Final = 128  # rows from which decoding pays for dense layers
_OWN: Final = 1  # rows up to which every block rotates them itself
_ROTATE_WARPS: Final = 16  # of a row


@dataclass(slots=True, eq=False)
class Trellis:
    """A weight [N, K], or one for each expert, as stored; `signs` and `block` serve all experts."""

    packed: PackedWeight
    words: torch.Tensor  # int32 [(E,) N / 64, K / 8, 32]
    scales: torch.Tensor  # float32 [(E,) N]
    signs: torch.Tensor  # int8 [K]
    block: int
    is_native: bool

    @property
    def tiles(self) -> int:
        """Sixty-fours of outputs."""
        return int(self.words.shape[-3])


def prepare(weight: PackedWeight) -> Trellis:
    """As stored; whole tiles and turns are what the kernels can read."""
    held = weight.tensors
    signs, blocks = held["signs"], held["block"].reshape(-1)
    is_shared = True
    if weight.num_experts:
        is_shared = bool((signs == signs[0]).all()) and bool((blocks == blocks[0]).all())
        signs = signs[0]
    whole = weight.out_features % _TILE == 0 and weight.in_features % _TURN == 0
    return Trellis(
        weight,
        held["weight"].contiguous(),
        held["scale"].float().contiguous(),
        signs.contiguous(),
        int(blocks[0]),
        is_shared and whole and weight.in_features % 8 == 0,
    )


def linear(x: torch.Tensor, weight: Trellis, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K], rotated, times weight [N, K] transposed, plus bias."""
    rows = x.shape[0]
    if not rows:
        return torch.empty((0, weight.packed.out_features), dtype=x.dtype, device=x.device)
    if not (weight.is_native and native_runs(x)):
        seen = weight.packed.activate(x)
        y = F.linear(seen, weight.packed.dequantize())
        return (y if bias is None else y + bias.float()).to(x.dtype)
    x = x if x.stride(-1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    if rows > _MANY and not batch_invariant():
        return F.linear(rotated(x, weight), decoded(weight, x.dtype), bias)
    return product(choose(weight, rows), x, weight, bias)


def product(
    shape: Few | Wide, x: torch.Tensor, weight: Trellis, bias: torch.Tensor | None
) -> torch.Tensor:
    """Of a dense layer, by one kernel or, where every block cannot rotate x itself, two."""
    rows = x.shape[0]
    if isinstance(shape, Wide):
        seen = rotate(x, weight, by_pairs=True)
        return _wide_product(seen, x.dtype, weight, shape, bias, rows)
    given = x if shape.own else rotate(x, weight)
    return _product(given, x.dtype, weight, shape, bias, rows)


@dataclass(frozen=True, slots=True)
class Rotated:
    """What the products read: four int8 for two inputs, what rows are multiplied with, their sums."""

    numbers: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor


def rotate(x: torch.Tensor, weight: Trellis, *, by_pairs: bool = False) -> Rotated:
    """x [T, K] through signs and transforms, rounded. `by_pairs`: in tet_gemm.cu's order."""
    rows, width = x.shape
    numbers = torch.empty((rows, 2 * width), dtype=torch.int8, device=x.device)
    scales = torch.empty((rows,), dtype=torch.float32, device=x.device)
    sums = torch.empty((rows,), dtype=torch.int32, device=x.device)
    _rotate(x, weight, [numbers, None, scales, sums], by_pairs=by_pairs)
    return Rotated(numbers, scales, sums)


def rotated(x: torch.Tensor, weight: Trellis) -> torch.Tensor:
    """x [T, K] through signs and transforms, in its own dtype."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate(x, weight, [None, y, None, None])
    return y


def _rotate(
    x: torch.Tensor,
    weight: Trellis,
    outputs: list[torch.Tensor | None],
    *,
    by_pairs: bool = False,
) -> None:
    rows, width = x.shape
    defines = {
        "WARPS": _ROTATE_WARPS,
        **_rotation(x.dtype, width, weight.block),
        "ORDER": int(by_pairs),
    }
    kernel = native.function("tet_rotate", defines)
    stride = ctypes.c_longlong(x.stride(0))
    arguments = [x, stride, weight.signs, *outputs, _norm(weight), _UNIT]
    shared = _row_bytes(width)
    native.launch(kernel, (rows, 1, 1), _ROTATE_WARPS * 32, arguments, shared=shared)


def _rotation(dtype: torch.dtype, width: int, block: int) -> dict[str, int]:
    """What rotate.cuh is specialized by."""
    return {
        "HALF": int(dtype == torch.float16),
        "WIDTH": width,
        "LEVELS": block.bit_length() - 1,
    }


def _row_bytes(width: int) -> int:
    """Shared memory of a row on its way through the rotation: spans of 256 inputs, in whole sixteens."""
    return -(-width // 4096) * 16 * 528


def _norm(weight: Trellis) -> float:
    return float(weight.block**-0.5)


@dataclass(frozen=True, slots=True)
class Few:
    """How tet_gemv.cu is specialized."""

    columns: int  # eights of rows
    warps: int
    ahead: int  # turns that weights are asked for ahead
    resident: int  # blocks a multiprocessor should hold
    together: int = 1  # sixty-fours of outputs of a block
    own: int = 0  # rows that every block rotates itself


@dataclass(frozen=True, slots=True)
class Wide:
    """How tet_gemm.cu is specialized."""

    rows: int  # of a block
    split: int = 1  # blocks that divide K
    ahead: int = 2

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: tiles of x, parts of the sums, what aligning takes."""
        tiles, parts = _STAGES * self.rows * 128, self.rows * (256 + 4) * 4
        return 1024 + (tiles + parts if self.split > 1 else max(tiles, parts))


def choose_grouped(columns: int, blocks: int, *, paired: bool) -> Few:
    """As measured on an H200."""
    if paired:
        return Few(columns, 4, 4, 3 if columns == 1 else 2, together=2)
    if blocks < 400:  # few blocks: more warps share one
        return Few(columns, 16, 8 if columns == 1 else 4, 1)
    if columns == 1:
        return Few(columns, 2, 8, 5) if blocks > 2000 else Few(columns, 4, 8, 3)
    return Few(columns, 4, 4, 4)


def choose(weight: Trellis, rows: int) -> Few | Wide:
    """For a dense layer, as measured on an H200."""
    if rows <= _OWN:
        return Few(1, 16, 8, 1, own=rows)
    if rows <= 16:
        return Few(1 if rows <= 8 else 2, 16, 8 if rows <= 8 else 4, 1)
    return Wide(32 if rows <= 32 else 64, 8)


def _product(
    x: Rotated | torch.Tensor,
    dtype: torch.dtype,
    weight: Trellis,
    shape: Few,
    bias: torch.Tensor | None,
    num_rows: int,
    grouping: Grouping | None = None,
    *,
    paired: bool = False,
) -> torch.Tensor:
    """tet_gemv.cu; with shape.own x is what the layer was given."""
    given = (x, None, None) if isinstance(x, torch.Tensor) else (x.numbers, x.scales, x.sums)
    width = weight.packed.out_features // (2 if paired else 1)
    y = torch.empty((num_rows, width), dtype=dtype, device=weight.words.device)
    tiles = weight.tiles // 2 if paired else -(-weight.tiles // shape.together)
    columns = 8 * shape.columns
    blocks = -(-num_rows // columns) if grouping is None else grouping.blocks
    defines = {
        **_rotation(dtype, weight.packed.in_features, weight.block),
        "TILES": shape.columns,
        "MT": shape.together,
        "WARPS": shape.warps,
        "AHEAD": shape.ahead,
        "RESIDENT": shape.resident,
        "OWN": shape.own,
        "PAIRED": int(paired),
        "GROUPED": int(grouping is not None),
    }
    order = None if grouping is None else grouping.order
    arguments = [
        *given,
        weight.words,
        weight.scales,
        bias,
        y,
        None if order is None else order.slots,
        None if order is None else order.experts,
        None if grouping is None else grouping.ids,
        num_rows,
        weight.packed.out_features,
        weight.tiles,
        1 if grouping is None else grouping.divisor,
        ctypes.c_longlong(given[0].stride(0)),
        weight.signs,
        _norm(weight) * _UNIT,
    ]
    parts = shape.warps * shape.together * 64 * (columns + 1) * 4
    inputs = shape.warps * shape.ahead * shape.columns * 512
    if shape.own:
        inputs = shape.own * _row_bytes(weight.packed.in_features)
    kernel = native.function("tet_gemv", defines)
    grid = (tiles, blocks, 1)
    native.launch(kernel, grid, shape.warps * 32, arguments, shared=max(inputs, parts))
    return y


def decoded(weight: Trellis, dtype: torch.dtype) -> torch.Tensor:
    """[(E,) N, K] in dtype, in the rotated space."""
    packed = weight.packed
    lead = (packed.num_experts,) if packed.num_experts else ()
    shape = (*lead, packed.out_features, packed.in_features)
    y = torch.empty(shape, dtype=dtype, device=weight.words.device)
    kernel = native.function("tet_unpack", {"HALF": int(dtype == torch.float16), "WARPS": 8})
    width = packed.in_features
    turns, tiles = width // _TURN, weight.tiles * max(1, packed.num_experts)
    arguments = [weight.words, weight.scales, y, width, turns, _UNIT]
    native.launch(kernel, (-(-turns // 8), tiles, 1), 256, arguments)
    return y


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
    whole = gate_up.packed.out_features % (2 * _TILE) == 0
    if not (gate_up.is_native and down.is_native and whole and native_runs(x)):
        return _one_by_one(x, topk_ids, topk_weights, gate_up, down)
    slots, experts = tokens * top_k, gate_up.packed.num_experts
    each = slots / experts
    shapes = [(experts, w.packed.out_features, w.packed.in_features) for w in (gate_up, down)]
    if each > _MANY_EACH and may_unpack(*shapes) and not batch_invariant():
        halves = [decoded(weight, x.dtype) for weight in (gate_up, down)]
        seen = (partial(rotated, weight=gate_up), partial(rotated, weight=down))
        return by_halves(x, topk_ids, topk_weights, halves, seen)
    if tokens <= _ALONE and not batch_invariant():
        rows, wide = 8, 0
        groups = [Grouping(slots, divisor, ids=topk_ids) for divisor in (top_k, 1)]
    else:
        wide = _wide_rows(each, gate_up, down)
        rows = wide or 8
        order = order_by_expert(topk_ids, experts, rows)
        groups = [Grouping(slots, divisor, order) for divisor in (top_k, 1)]

    def multiply(
        x: torch.Tensor, weight: Trellis, group: Grouping, *, paired: bool
    ) -> torch.Tensor:
        seen = rotate(x, weight, by_pairs=wide > 0)
        if wide:
            shape = Wide(wide, ahead=2 if wide == 64 else 4)
            return _wide_product(seen, x.dtype, weight, shape, None, slots, group, paired=paired)
        tiles = weight.tiles // (2 if paired else 1)
        few = choose_grouped(1, tiles * group.blocks, paired=paired)
        return _product(seen, x.dtype, weight, few, None, slots, group, paired=paired)

    hidden = multiply(x, gate_up, groups[0], paired=True)
    return combined(multiply(hidden, down, groups[1], paired=False), topk_weights)


def _wide_rows(each: float, *weights: Trellis) -> int:
    """Rows of a block of tet_gemm.cu for so many rows an expert; 0: few rows, or sizes it cannot read."""
    if each <= _FEW or any(weight.packed.in_features % (2 * _TURN) for weight in weights):
        return 0
    return 32 if each <= 24 else 64


def _wide_product(
    x: Rotated,
    dtype: torch.dtype,
    weight: Trellis,
    shape: Wide,
    bias: torch.Tensor | None,
    num_rows: int,
    grouping: Grouping | None = None,
    *,
    paired: bool = False,
) -> torch.Tensor:
    """tet_gemm.cu."""
    width = weight.packed.out_features // (2 if paired else 1)
    y = torch.empty((num_rows, width), dtype=dtype, device=x.numbers.device)
    defines = {
        "HALF": int(dtype == torch.float16),
        "BN": shape.rows,
        "SPLIT": shape.split,
        "AHEAD": shape.ahead,
        "STAGES": _STAGES,
        "PAIRED": int(paired),
    }
    order = None if grouping is None else grouping.order
    arguments = [
        x.numbers,
        x.scales,
        x.sums,
        weight.words,
        weight.scales,
        bias,
        y,
        None if order is None else order.slots,
        None if order is None else order.experts,
        num_rows,
        weight.packed.out_features,
        weight.tiles,
        weight.packed.in_features // (2 * _TURN),
        1 if grouping is None else grouping.divisor,
    ]
    rows = -(-num_rows // shape.rows) if grouping is None else grouping.blocks
    grid = (
        -(-weight.tiles // 4),
        rows,
        shape.split,
    )  # of four tiles, half of them gates where paired
    kernel = native.function("tet_gemm", defines)
    native.launch(kernel, grid, 128, arguments, shared=shape.shared, cluster=shape.split)
    return y


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
    for expert in torch.unique(flat).tolist():
        slots = torch.nonzero(flat == expert)[:, 0]
        first, second = gate_up.packed.expert(expert), down.packed.expert(expert)
        both = F.linear(first.activate(x[slots // top_k]), first.dequantize()).to(x.dtype)
        gate, up = both.float().chunk(2, -1)
        hidden = (F.silu(gate) * up).to(x.dtype)
        y[slots] = F.linear(second.activate(hidden), second.dequantize()).to(x.dtype).float()
    shares = topk_weights.unsqueeze(-1) * y.view(tokens, top_k, -1)
    return shares.sum(1).to(x.dtype)
