"""Products with what adapters add to them, in one launch of native/gemm.cu: how it is cut."""

from __future__ import annotations

import functools
import os
import struct
from dataclasses import dataclass, replace
from typing import Any

import torch

from .common import num_processors
from .plans import MOST_SHARED, ROWS, Plan, Product, shared_bytes, tiles_of

_MOST_SLOTS = 32  # a bit each; all are multiplied with
EARLY = int(os.environ.get("X_EARLY", "1"))
_MOST_DEPTHS, _DEEP = int(os.environ.get("X_MOST", "8")), int(os.environ.get("X_DEEP", "4"))  # parts of K that sums are made of, and tiles of one
_NO_END = 2**31 - 1
_RECORD = struct.Struct("@5P3i4x")
_SHARED_OF_ALL = 227 * 1024  # blocks on one multiprocessor


@dataclass(frozen=True, slots=True)
class Shape:
    """Slots of adapters, their rank, and the last output of each part of the product, plus one."""

    slots: int
    rank: int
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adapters:
    """What rows add to a product, see lora.py: a [slots, parts * rank, K], b [slots, N, rank] in
    x's dtype, slots [T] int32. kept: of an engine."""

    a: torch.Tensor
    b: torch.Tensor
    ends: tuple[int, ...]
    slots: torch.Tensor
    kept: dict[Any, tuple[torch.Tensor, torch.Tensor]]

    @property
    def shape(self) -> Shape:
        """What kernels are compiled for."""
        return Shape(self.a.shape[0], self.b.shape[2], self.ends)

    def record(self, plan: Plan, product: Product, num_rows: int) -> bytes:
        """As native/gemm.cu reads it, with room for what its blocks leave each other."""
        depths = _depths(plan, product, self.shape)
        blocks = num_blocks(plan, product, num_rows, self.shape) * plan.split
        tensors = (self.a, self.b, self.slots, *self._place(depths, blocks))
        ends = (*self.ends[:-1], _NO_END, _NO_END)[:2]
        sums = _sums(plan, product, num_rows, self.shape)
        return _RECORD.pack(*(t.data_ptr() for t in tensors), sums, *ends)

    def _place(self, depths: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where so many blocks leave sums with the launch's number, and where they are counted, for
        launches are told apart by that. No other engine's launches may use it: they may run at
        the same time."""
        key = (self.shape, depths, blocks)
        if key not in self.kept:
            if torch.cuda.is_current_stream_capturing():
                print("LORA PLACE IN CAPTURE", flush=True)
            device, shape = self.a.device, self.shape
            size = (depths, ROWS[-1], len(shape.ends), -(-shape.rank // 16) * 16)
            sums = torch.zeros(size, dtype=torch.float32, device=device)
            self.kept[key] = sums, torch.zeros(1, dtype=torch.int64, device=device)
        return self.kept[key]


def defines(plan: Plan, product: Product, shape: Shape) -> dict[str, int]:
    """What native/gemm.cu is compiled for."""
    return {
        "LORA": 1,
        "SLOTS": shape.slots,
        "RANK": shape.rank,
        "PARTS": len(shape.ends),
        "DEPTHS": _depths(plan, product, shape),
        "EARLY": EARLY,
    }


def _depths(plan: Plan, product: Product, shape: Shape) -> int:
    """Parts of K that sums are made of: a whole number for each block of a cluster. A thread holds
    its rows' sums of all of them, so that there are fewer of a large rank."""
    most = max(1, _MOST_DEPTHS // -(-shape.rank // 16) // (1 + (product.epilogue == "gated")))
    wanted = min(most, -(-product.depth // 64 // _DEEP))
    return -(-wanted // plan.split) * plan.split


def _sums(plan: Plan, product: Product, num_rows: int, shape: Shape) -> int:
    """Blocks along x that make sums."""
    tiles = -(-shape.slots * len(shape.ends) * shape.rank // plan.columns)
    return tiles * -(-num_rows // plan.rows) * (_depths(plan, product, shape) // plan.split)


def all_shared_bytes(plan: Plan, shape: Shape) -> int:
    """What a block keeps in shared memory."""
    of_product = shared_bytes(plan.rows, plan.columns, plan.stages, plan.split)
    own = -(-shape.slots // plan.split) * -(-shape.rank // 16) * 16
    return of_product + -(-own // 64) * plan.columns * 128 + 16


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
    if product.depth % 64 or shape.slots > _MOST_SLOTS or len(shape.ends) > 3:
        return None
    if shape.rank % 16 and shape.rank != 8:
        return None
    plan = alone if alone.kind == "gemm" else tiles_of(product, num_rows)
    if plan.kind != "gemm":
        return None
    share = -(-product.depth // 64 // plan.split)
    if share * (plan.split - 1) >= product.depth // 64:  # a block without a share asks for no B
        return None
    if product.epilogue != "gated" and any(end % plan.columns for end in shape.ends[:-1]):
        return None
    return fitted(plan, product, num_rows, shape)


def fitted(plan: Plan, product: Product, num_rows: int, shape: Shape) -> Plan | None:
    """The plan with so many stages that all blocks find a place at a time, if fewer can help; None
    where not even three fit."""
    blocks = num_blocks(plan, product, num_rows, shape) * plan.split
    found: Plan | None = None
    for stages in range(3, plan.stages + 1):
        fewer = replace(plan, stages=stages)
        needed = all_shared_bytes(fewer, shape) + 1024
        places = _SHARED_OF_ALL // needed * num_processors()
        if needed > MOST_SHARED or (found is not None and stages > 4 and places < blocks):
            break
        found = fewer
    return found
