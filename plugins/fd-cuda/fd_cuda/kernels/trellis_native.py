"""Launches of native/tet_rotate.cu, tet_gemv.cu and tet_unpack.cu: what the trellis code of two
bits needs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from . import native
from .native import tensor_map
from .quant_grouped import Matrix, grouped_product
from .quant_layout import TRELLIS
from .quant_native import fed
from .quant_shapes import Grouped, Tile, only_resident, slab_bytes

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight

    from .routing import Order

# What the code's numbers, whole bytes, are multiplied with: its spread over its deviation.
_UNIT: Final = 1.03 / 128.0
TILE: Final = 64  # outputs of a strand
TURN: Final = 32  # inputs of four strands
_STRANDS: Final = 4
_LANES: Final = 8  # that share a strand
_ROTATE_WARPS: Final = 8  # of a row
_SPAN_BYTES: Final = 528  # of 256 inputs while they are rotated


@dataclass(slots=True, eq=False)
class Trellis:
    """A weight [N, K], or one for each expert; `signs` and `block` serve all experts. Where it is
    native, the words of four strands lie in the order in which lanes read them, in `packed` too."""

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

    @property
    def stored(self) -> PackedWeight:
        """With the words as the format has them."""
        if not self.is_native:
            return self.packed
        words = _exchanged(self.words, _LANES, _STRANDS)
        return replace(self.packed, tensors={**self.packed.tensors, "weight": words})


def by_lanes(packed: PackedWeight) -> PackedWeight:
    """Sixteen bytes of one strand after the same of the next: what lanes that follow each other
    read."""
    words = _exchanged(packed.tensors["weight"], _STRANDS, _LANES)
    return replace(packed, tensors={**packed.tensors, "weight": words})


def _exchanged(words: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Of every turn's 16 bytes [outer, inner] to [inner, outer]."""
    pieces = words.reshape(*words.shape[:-2], -1, outer, inner, 4).transpose(-2, -3)
    return pieces.reshape(words.shape)


@dataclass(frozen=True, slots=True)
class Rotated:
    """What the products read: four int8 for two inputs, what rows are multiplied with, their
    sums."""

    numbers: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor


@dataclass(frozen=True, slots=True)
class Gemv:
    """How tet_gemv.cu is specialized."""

    warps: int
    ahead: int  # turns that weights are asked for ahead
    resident: int  # blocks a multiprocessor should hold
    tiles: int = 1  # sixty-fours of outputs of a block; two for gates and what belongs to them
    rows: int = 8  # of a block
    split: int = 1  # blocks that divide K
    rotates: bool = False  # every block its one row

    def shared(self, width: int) -> int:
        """Bytes of shared memory of a block: x, what warps have added up, what other blocks
        send. Sums stand where x was, after it where the block rotates it."""
        part = self.tiles * TILE * (self.rows + 1) * 4
        sums = (self.warps + (self.split if self.split > 1 else 0)) * part
        if self.rotates:
            whole = _row_bytes(width) + sums
        else:
            whole = max(self.warps * self.ahead * self.rows * 64, sums)
        return only_resident(whole, 1) if self.resident == 1 else whole


def rotate(x: torch.Tensor, weight: Trellis) -> Rotated:
    """x [T, K] through signs and transforms, rounded."""
    rows, width = x.shape
    numbers = torch.empty((rows, 2 * width), dtype=torch.int8, device=x.device)
    scales = torch.empty((rows,), dtype=torch.float32, device=x.device)
    sums = torch.empty((rows,), dtype=torch.int32, device=x.device)
    _rotate(x, weight, [numbers, None, scales, sums])
    return Rotated(numbers, scales, sums)


def placed(
    x: torch.Tensor, weight: Trellis, order: Order, copies: int, *, decodes: bool
) -> Rotated:
    """As quant_grouped.cu reads it: rows of x, each once for each of its `copies` experts, or,
    where there are none, rows that stand in this order. `decodes`: one number for an input."""
    if order.places is None:
        raise ValueError("an order without places of its rows")
    rows, width = len(order.slots), x.shape[1]
    shape = (rows, width * (1 if decodes else 2))
    numbers = torch.empty(shape, dtype=torch.int8, device=x.device)
    scales = torch.empty((rows,), dtype=torch.float32, device=x.device)
    sums = torch.empty((rows,), dtype=torch.int32, device=x.device)
    _rotate(x, weight, [numbers, None, scales, sums], order.places, copies, decodes=decodes)
    return Rotated(numbers if decodes else numbers.view(torch.int16), scales, sums)


def rotated(x: torch.Tensor, weight: Trellis) -> torch.Tensor:
    """x [T, K] through signs and transforms, in its own dtype."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate(x, weight, [None, y, None, None])
    return y


def _rotate(
    x: torch.Tensor,
    weight: Trellis,
    outputs: list[torch.Tensor | None],
    places: torch.Tensor | None = None,
    copies: int = 0,
    *,
    decodes: bool = False,
) -> None:
    rows, width = x.shape
    defines = {
        "WARPS": _ROTATE_WARPS,
        **_rotation(x.dtype, width, weight.block),
        "PLACED": int(places is not None),
        "SINGLE": int(decodes),
    }
    stride = ctypes.c_longlong(x.stride(0))
    arguments = [x, stride, weight.signs, *outputs, _UNIT, places, copies]
    kernel = native.function("tet_rotate", defines)
    threads, shared = _ROTATE_WARPS * 32, _row_bytes(width)
    blocks = rows if copies or places is None else len(places)
    native.launch(kernel, (blocks, 1, 1), threads, arguments, shared=shared)


def _rotation(dtype: torch.dtype, width: int, block: int) -> dict[str, int]:
    """What rotate.cuh is specialized by."""
    return {
        "HALF": int(dtype == torch.float16),
        "WIDTH": width,
        "LEVELS": block.bit_length() - 1,
    }


def _row_bytes(width: int) -> int:
    """Shared memory of a row on its way through the rotation: spans of 256 inputs, in whole
    sixteens."""
    return -(-width // 4096) * 16 * _SPAN_BYTES


def product(
    shape: Gemv,
    x: torch.Tensor | Rotated,
    dtype: torch.dtype,
    weight: Trellis,
    num_rows: int,
    bias: torch.Tensor | None = None,
    order: Order | torch.Tensor | None = None,
    *,
    paired: bool = False,
) -> torch.Tensor:
    """[num_rows, N] by tet_gemv.cu, x as it is where shape.rotates says so: of a dense layer; of
    experts in an order whose blocks have eight rows; or of one row of x for so many rows after each
    other, each of the expert of this id."""
    given = (x, None, None) if isinstance(x, torch.Tensor) else (x.numbers, x.scales, x.sums)
    packed = weight.packed
    width = packed.out_features // (2 if paired else 1)
    y = torch.empty((num_rows, width), dtype=dtype, device=weight.words.device)
    defines = {
        **_rotation(dtype, packed.in_features, weight.block),
        "WARPS": shape.warps,
        "AHEAD": shape.ahead,
        "RESIDENT": shape.resident,
        "TILES": shape.tiles,
        "COLUMNS": shape.rows,
        "SPLIT": shape.split,
        "OWN": int(shape.rotates),
        "PAIRED": int(paired),
        "GROUPED": int(order is not None),
    }
    slots, experts, ids, blocks = None, None, None, -(-num_rows // shape.rows)
    if isinstance(order, torch.Tensor):
        ids, blocks = order, num_rows
    elif order is not None:
        slots, experts, blocks = order.slots, order.experts, len(order.experts)
    arguments = [
        given[0],
        ctypes.c_longlong(given[0].stride(0)),
        *given[1:],
        weight.words,
        weight.scales,
        bias,
        y,
        slots,
        experts,
        ids,
        weight.signs,
        _UNIT,
        num_rows,
        packed.out_features,
        weight.tiles,
        num_rows // given[0].shape[0],
    ]
    kernel = native.function("tet_gemv", defines)
    grid = (weight.tiles // shape.tiles, blocks, shape.split)
    shared = shape.shared(packed.in_features)
    native.launch(kernel, grid, shape.warps * 32, arguments, shared=shared, cluster=shape.split)
    return y


def tile_product(
    shape: Tile,
    x: Rotated,
    dtype: torch.dtype,
    weight: Trellis,
    bias: torch.Tensor | None,
    num_rows: int,
) -> torch.Tensor:
    """By quant_tile.cu: many rows, of inputs in whole sixty-fours; as product() of quant_native.py
    says."""
    packed = weight.packed
    y = torch.empty((num_rows, packed.out_features), dtype=dtype, device=x.scales.device)
    defines = {
        "HALF": 0,
        "Y_HALF": int(dtype == torch.float16),
        "FORMAT": TRELLIS,
        "SCALED": 0,
        "PAIRED": 0,
        "GROUPED": 0,
    }
    turns = packed.in_features // TILE
    arguments = [
        weight.words,
        None,
        weight.scales,
        x.scales,
        x.sums,
        bias,
        y,
        None,
        None,
        num_rows,
        packed.out_features,
        weight.tiles,
        turns,
        turns,
        None,
    ]
    numbers = x.numbers.view(torch.int16)
    fed(shape, defines, numbers, arguments, weight.tiles, -(-num_rows // shape.rows))
    return y


def grouped_experts(
    shape: Grouped,
    x: torch.Tensor,
    order: Order,
    top_k: int,
    gate_up: Trellis,
    down: Trellis,
    *,
    decodes: bool,
) -> torch.Tensor:
    """By quant_grouped.cu: [num_slots, H], the gated MLPs of the experts that rows slot // top_k of
    x go to in this order."""
    y, num_slots = x, x.shape[0] * top_k
    for weight, copies in ((gate_up, top_k), (down, 0)):
        seen = placed(y, weight, order, copies, decodes=decodes)
        y = grouped_product(
            shape, seen.numbers, seen.scales, _matrix(shape, weight), x.dtype, order, num_slots,
            paired=copies > 0, x_sums=seen.sums,
        )  # fmt: skip
    return y


def _matrix(shape: Grouped, weight: Trellis) -> Matrix:
    turns, size = -(-weight.packed.in_features // TILE), slab_bytes(TRELLIS)
    words = weight.words.view(-1, weight.words.shape[-2] * weight.words.shape[-1])
    boxes = tensor_map.slab_boxes(words.view(torch.uint8), 2 * size, shape.slabs // 8)
    width = weight.packed.out_features
    return Matrix(TRELLIS, 0, width, turns, boxes, None, turns, weight.scales, slab_rows=TILE)


def decoded(weight: Trellis, dtype: torch.dtype) -> torch.Tensor:
    """[(E,) N, K] in dtype, in the rotated space."""
    packed = weight.packed
    lead = (packed.num_experts,) if packed.num_experts else ()
    shape = (*lead, packed.out_features, packed.in_features)
    y = torch.empty(shape, dtype=dtype, device=weight.words.device)
    kernel = native.function("tet_unpack", {"HALF": int(dtype == torch.float16), "WARPS": 8})
    width = packed.in_features
    turns, tiles = width // TURN, weight.tiles * max(1, packed.num_experts)
    arguments = [weight.words, weight.scales, y, width, turns, _UNIT]
    native.launch(kernel, (-(-turns // 8), tiles, 1), 256, arguments)
    return y
