"""Products with what adapters add to them, in one launch of native/gemm.cu: how it is cut."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, replace

import torch

from .common import num_processors
from .plans import MOST_SHARED, Plan, Product, shared_bytes, tiles_of

_MOST_SLOTS = 32  # all are multiplied with
_FEWEST_COLUMNS = 32  # of a tile
_NO_END = 2**31 - 1
_RECORD = struct.Struct("@5P3i4x")
_SHARED_OF_ALL = 228 * 1024  # blocks on one multiprocessor, 1024 bytes of each the driver's
_SIXTEEN = 64  # bytes of sixteen sums
_HEAD = 16  # bytes before the sums
_NUMBER = 16  # bytes for the number of a launch


@dataclass(frozen=True, slots=True)
class Shape:
    """Slots of adapters, their rank, and the last output of each part of the product, plus one."""

    slots: int
    rank: int
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adapters:
    """What rows add to a product, see lora.py: a [slots, parts * rank, K], b [slots, N, rank] in
    x's dtype, slots [T] int32."""

    a: torch.Tensor
    b: torch.Tensor
    ends: tuple[int, ...]
    slots: torch.Tensor

    @property
    def shape(self) -> Shape:
        """What kernels are compiled for."""
        return Shape(self.a.shape[0], self.b.shape[2], self.ends)

    def record(self, plan: Plan, product: Product, num_rows: int) -> bytes:
        """As native/gemm.cu reads it, with room for what its blocks leave each other."""
        depths, parts = _depths(plan, product), len(self.ends)
        needed = _HEAD + depths * num_rows * parts * _sixteens(self.shape) * _SIXTEEN
        room = _room(self.a.device, 1 << (needed - 1).bit_length()).data_ptr()
        pointers = (self.a.data_ptr(), self.b.data_ptr(), self.slots.data_ptr(), room + _HEAD, room)
        ends = (*self.ends[:-1], _NO_END, _NO_END)[:2]
        return _RECORD.pack(*pointers, _sums(plan, product, num_rows, self.shape), *ends)


@functools.cache
def _room(device: torch.device, size: int) -> torch.Tensor:
    """Of all launches that need no more, one after the other: each gives its sums a number, so that
    they are told from what the ones before have left."""
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _sixteens(shape: Shape) -> int:
    """Of the rank, the last one filled up."""
    return -(-shape.rank // 16)


def defines(plan: Plan, product: Product, shape: Shape) -> dict[str, int]:
    """What native/gemm.cu is compiled for."""
    return {
        "LORA": 1,
        "SLOTS": shape.slots,
        "RANK": shape.rank,
        "PARTS": len(shape.ends),
        "DEPTHS": _depths(plan, product),
    }


def _depths(plan: Plan, product: Product) -> int:
    """Parts of K that sums are made of: each half of what a block multiplies, so that sums are
    there when it comes to its end."""
    return 2 * plan.split


def _sums(plan: Plan, product: Product, num_rows: int, shape: Shape) -> int:
    """Blocks along x that make sums."""
    tiles = -(-shape.slots * len(shape.ends) * _sixteens(shape) * 16 // plan.columns)
    return tiles * -(-num_rows // plan.rows) * (_depths(plan, product) // plan.split)


def _own_slots(plan: Plan, shape: Shape) -> int:
    """Of a block: those of a cluster divide them among themselves."""
    return -(-shape.slots // plan.split)


def all_shared_bytes(plan: Plan, shape: Shape) -> int:
    """What a block keeps in shared memory."""
    b = -(-_own_slots(plan, shape) * _sixteens(shape) // 4) * plan.columns * 128
    return shared_bytes(plan.rows, plan.columns, plan.stages, plan.split) + b + _NUMBER


def num_blocks(plan: Plan, product: Product, num_rows: int, shape: Shape | None) -> int:
    """Along x of the grid."""
    is_gated = product.epilogue == "gated"
    tiles = -(-(product.width >> is_gated) // (plan.columns >> is_gated))
    sums = 0 if shape is None else _sums(plan, product, num_rows, shape)
    return tiles * -(-num_rows // plan.rows) + sums


@functools.cache
def choose(alone: Plan, product: Product, num_rows: int, shape: Shape) -> Plan | None:
    """How it is cut, given the plan of the product alone; None where native/gemm.cu does not
    compute it."""
    if product.depth % 64 or shape.rank % 8 or shape.slots > _MOST_SLOTS or len(shape.ends) > 3:
        return None
    plan = alone if alone.kind == "gemm" else tiles_of(product, num_rows)
    if plan.kind != "gemm":
        return None
    columns, inner_ends = plan.columns, () if product.epilogue == "gated" else shape.ends[:-1]
    while any(end % columns for end in inner_ends):  # the outputs of a block are of one part
        columns //= 2
        if columns < _FEWEST_COLUMNS:
            return None
    return fitted(replace(plan, columns=columns), product, num_rows, shape)


def fitted(plan: Plan, product: Product, num_rows: int, shape: Shape) -> Plan | None:
    """The plan with so many stages that all blocks find a place at a time, if fewer can help; None
    where not even three fit."""
    blocks = num_blocks(plan, product, num_rows, shape) * plan.split
    found: Plan | None = None
    for stages in range(3, plan.stages + 1):
        fewer = replace(plan, stages=stages)
        needed = all_shared_bytes(fewer, shape)
        places = _SHARED_OF_ALL // (needed + 1024) * num_processors()
        if needed > MOST_SHARED or (found is not None and stages > 4 and places < blocks):
            break
        found = fewer
    return found
