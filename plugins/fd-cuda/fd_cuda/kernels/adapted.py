"""Products with what adapters add to them, in one launch of native/gemm.cu: how it is cut. A x is
computed there, too, or was by an earlier launch."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, replace

import torch

from .common import num_processors
from .plans import MOST_SHARED, Plan, Product, shared_bytes, tiles_of

HELPERS = 128  # threads of a block that fetch what adapters add
_MOST_SLOTS = 32  # a bit each; all are multiplied with
_MOST_DEPTHS, _DEEP = 16, 4  # parts of K that sums are made of, and tiles of one
_NO_END = 2**31 - 1
_RECORD = struct.Struct("@5P3i4x")
_SHARED_OF_ALL = 227 * 1024  # blocks on one multiprocessor


@dataclass(frozen=True, slots=True)
class Shape:
    """Slots of adapters, their rank, the last output of each part of the product, plus one, and how
    many parts of K an earlier launch made sums of; 0: the product's own makes them."""

    slots: int
    rank: int
    ends: tuple[int, ...]
    made: int = 0


@dataclass(frozen=True, slots=True)
class Adapters:
    """What rows add to a product, see lora.py: a [slots, parts * rank, K], b [slots, N, rank] in
    x's dtype, slots [T] int32. kept: of their engine, whose launches follow one another. inner
    [parts of K, T, parts * rank] float32: A x, if an earlier launch made it."""

    a: torch.Tensor
    b: torch.Tensor
    ends: tuple[int, ...]
    slots: torch.Tensor
    kept: dict[str, torch.Tensor]
    inner: torch.Tensor | None = None

    @property
    def shape(self) -> Shape:
        """What kernels are compiled for."""
        made = 0 if self.inner is None else self.inner.shape[0]
        return Shape(self.a.shape[0], self.b.shape[2], self.ends, made)

    def record(self, plan: Plan, product: Product, num_rows: int) -> bytes:
        """As native/gemm.cu reads it, with room for what its blocks leave each other."""
        device = self.a.device
        inner = self.inner
        if inner is None:
            sizes = (_depths(plan, product), num_rows, self.a.shape[1])
            inner = torch.empty(sizes, dtype=torch.float32, device=device)
        if "meeting" not in self.kept:
            self.kept["meeting"] = torch.zeros(2, dtype=torch.int32, device=device)
        tensors = (self.a, self.b, self.slots, inner, self.kept["meeting"])
        ends = (*self.ends[:-1], _NO_END, _NO_END)[:2]
        sums = _sums(plan, product, num_rows, self.shape)
        return _RECORD.pack(*(t.data_ptr() for t in tensors), sums, *ends)


def defines(plan: Plan, product: Product, shape: Shape) -> dict[str, int]:
    """What native/gemm.cu is compiled for."""
    return {
        "LORA": 2 if shape.made else 1,
        "SLOTS": shape.slots,
        "RANK": shape.rank,
        "PARTS": len(shape.ends),
        "DEPTHS": shape.made or _depths(plan, product),
    }


def _depths(plan: Plan, product: Product) -> int:
    """Parts of K that sums are made of: a whole number for each block of a cluster."""
    tiles = product.depth // 64
    wanted = min(_MOST_DEPTHS, -(-tiles // _DEEP))
    return -(-wanted // plan.split) * plan.split


def _sums(plan: Plan, product: Product, num_rows: int, shape: Shape) -> int:
    """Blocks along x that make sums."""
    if shape.made:
        return 0
    tiles = -(-shape.slots * len(shape.ends) * shape.rank // plan.columns)
    return tiles * -(-num_rows // plan.rows) * (_depths(plan, product) // plan.split)


def all_shared_bytes(plan: Plan, shape: Shape) -> int:
    """What a block keeps in shared memory."""
    if shape.made:
        slabs = -(-shape.slots // plan.split) * -(-shape.rank // 16)
        return (
            shared_bytes(plan.rows, plan.columns, plan.stages, plan.split)
            + slabs * plan.columns * 32
        )
    slots, inner = plan.rows * 4, plan.rows // plan.split * len(shape.ends) * shape.rank * 4
    b = shape.slots * plan.columns * shape.rank * 2
    of_product = shared_bytes(plan.rows, plan.columns, plan.stages, plan.split)
    return of_product + slots + inner + b


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
    if any(end % 4 for end in shape.ends):
        return None
    plan = alone if alone.kind == "gemm" else tiles_of(product, num_rows)
    if plan.kind != "gemm":
        return None
    return beside(plan, product, shape) if shape.made else fitted(plan, product, num_rows, shape)


def beside(plan: Plan, product: Product, shape: Shape) -> Plan | None:
    """The plan with as many stages as leave its blocks their places on a multiprocessor; None where
    a tile of outputs may be of two parts."""
    if product.epilogue != "gated" and any(end % plan.columns for end in shape.ends[:-1]):
        return None
    alone = shared_bytes(plan.rows, plan.columns, plan.stages, plan.split)
    places = _SHARED_OF_ALL // (alone + 1024)
    for stages in range(plan.stages, 2, -1):
        fewer = replace(plan, stages=stages)
        if (all_shared_bytes(fewer, shape) + 1024) * places <= _SHARED_OF_ALL:
            return fewer
    return None


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
