"""Products with what adapters add to them, in one launch of native/gemm.cu: how it is cut."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, replace

import torch

from .plans import MOST_SHARED, Plan, Product, shared_bytes, tiles_of

_MOST_SLOTS = 32  # all are multiplied with, whoever is there
_NO_END = 2**31 - 1
_RECORD = struct.Struct("@3P2i")


@dataclass(frozen=True, slots=True)
class Shape:
    """What kernels are compiled for: slots of adapters, their rank, the last output of each part of
    the product, plus one, and how many parts of K the sums A x come in."""

    slots: int
    rank: int
    ends: tuple[int, ...]
    splits: int


@dataclass(frozen=True, slots=True)
class Adapters:
    """What rows add to a product, see lora.py: b [slots, N, rank] in x's dtype, slots [T] int32,
    and A x, inner [splits, T, parts * rank] float32."""

    b: torch.Tensor
    ends: tuple[int, ...]
    slots: torch.Tensor
    inner: torch.Tensor

    @property
    def shape(self) -> Shape:
        return Shape(self.b.shape[0], self.b.shape[2], self.ends, self.inner.shape[0])

    def record(self) -> bytes:
        """As native/adapted.cuh reads it."""
        pointers = (t.data_ptr() for t in (self.b, self.slots, self.inner))
        return _RECORD.pack(*pointers, *(*self.ends[:-1], _NO_END, _NO_END)[:2])


def defines(shape: Shape) -> dict[str, int]:
    """What native/adapted.cuh is compiled for."""
    sizes = {"SLOTS": shape.slots, "RANK": shape.rank, "PARTS": len(shape.ends)}
    return {"LORA": 1, **sizes, "DEPTHS": shape.splits}


def all_shared_bytes(plan: Plan, shape: Shape) -> int:
    """What a block keeps in shared memory."""
    slabs = -(-shape.slots // plan.split) * -(-shape.rank // 16)
    alone = shared_bytes(plan.rows, plan.columns, plan.stages, plan.split)
    return alone + slabs * plan.columns * 32


@functools.cache
def choose(alone: Plan, product: Product, num_rows: int, shape: Shape) -> Plan | None:
    """How it is cut, given the plan of the product alone; None where native/gemm.cu does not
    compute it."""
    if product.depth % 64 or shape.rank % 8 or shape.slots > _MOST_SLOTS or len(shape.ends) > 3:
        return None
    plan = alone if alone.kind == "gemm" else tiles_of(product, num_rows)
    if plan.kind != "gemm":
        return None
    if product.epilogue != "gated":
        while any(end % plan.columns for end in shape.ends[:-1]):  # of one part each
            if plan.columns == 32:
                return None
            plan = replace(plan, columns=plan.columns // 2)
    # As many stages as leave the blocks their places on a multiprocessor.
    needed = shared_bytes(plan.rows, plan.columns, plan.stages, plan.split) + 1024
    places = (MOST_SHARED + 1024) // needed
    for stages in range(plan.stages, 2, -1):
        fewer = replace(plan, stages=stages)
        if (all_shared_bytes(fewer, shape) + 1024) * places <= MOST_SHARED + 1024:
            return fewer
    return None
