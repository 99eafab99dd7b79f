"""Products with what adapters add to them, in one launch of native/gemm.cu: how it is cut. Where a
norm stands before the product, the norm's launch makes the sums A x: native/norm_sums.cu."""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass, replace

import torch

from . import native
from .common import cdiv, num_processors
from .plans import MOST_SHARED, Plan, Product, measured, shared_bytes, tiles_of

HELPERS = 128  # threads of a block that fetch what adapters add
_MOST_SLOTS = 32  # a bit each; all are multiplied with
_MOST_DEPTHS = 16  # parts of K that sums are made of
_NO_END = 2**31 - 1
_RECORD = struct.Struct("@6P3i4x")
_SHARED_OF_ALL = 227 * 1024  # blocks on one multiprocessor
# Of native/norm_sums.cu: threads and rows of a block, inputs read at a time, rows of A.
_THREADS, _ROWS, _INPUTS, _RANKS = 128, 64, 128, 48


@dataclass(frozen=True, slots=True)
class Shape:
    """Slots of adapters, their rank, the last output of each part of the product, plus one, and the
    parts of K that sums were made of before the product; 0: it makes them."""

    slots: int
    rank: int
    ends: tuple[int, ...]
    depths: int = 0


@dataclass(frozen=True, slots=True)
class Sums:
    """A x of each row's own adapter: inner [depths, T, parts * rank], over parts of K, to be
    multiplied with scales [T]. float32."""

    inner: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class Adapters:
    """What rows add to a product, see lora.py: a [slots, parts * rank, K], b [slots, N, rank] in
    x's dtype, slots [T] int32."""

    a: torch.Tensor
    b: torch.Tensor
    ends: tuple[int, ...]
    slots: torch.Tensor
    sums: Sums | None = None

    @property
    def shape(self) -> Shape:
        """What kernels are compiled for."""
        depths = 0 if self.sums is None else self.sums.inner.shape[0]
        return Shape(self.a.shape[0], self.b.shape[2], self.ends, depths)

    def record(self, plan: Plan, product: Product, num_rows: int) -> bytes:
        """As native/gemm.cu reads it, with room for what its blocks leave each other."""
        device, sums = self.a.device, self.sums
        if sums is None:
            sizes = (_depths(plan, product, self.shape), num_rows, self.a.shape[1])
            inner = scales = torch.empty(sizes, dtype=torch.float32, device=device)
        else:
            inner, scales = sums.inner, sums.scales
        tensors = (self.a, self.b, self.slots, inner, scales, _meeting(device))
        ends = (*self.ends[:-1], _NO_END, _NO_END)[:2]
        makers = _sums(plan, product, num_rows, self.shape)
        return _RECORD.pack(*(t.data_ptr() for t in tensors), makers, *ends)


@functools.cache
def _meeting(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


def defines(plan: Plan, product: Product, shape: Shape) -> dict[str, int]:
    """What native/gemm.cu is compiled for."""
    return {
        "LORA": 1,
        "SLOTS": shape.slots,
        "RANK": shape.rank,
        "PARTS": len(shape.ends),
        "DEPTHS": _depths(plan, product, shape),
        "SUMMED": int(shape.depths > 0),
    }


def _depths(plan: Plan, product: Product, shape: Shape) -> int:
    """Parts of K that sums are made of: a whole number for each block of a cluster that makes
    them."""
    if shape.depths:
        return shape.depths
    tiles = product.depth // 64
    wanted = min(_MOST_DEPTHS, -(-tiles // plan.deep))
    return -(-wanted // plan.split) * plan.split


def _sums(plan: Plan, product: Product, num_rows: int, shape: Shape) -> int:
    """Blocks along x that make sums."""
    if shape.depths:
        return 0
    tiles = -(-shape.slots * len(shape.ends) * shape.rank // plan.columns)
    return tiles * -(-num_rows // plan.rows) * (_depths(plan, product, shape) // plan.split)


def all_shared_bytes(plan: Plan, product: Product, shape: Shape) -> int:
    """What a block keeps in shared memory."""
    slots, inner = plan.rows * 4, plan.rows // plan.split * len(shape.ends) * shape.rank * 4
    b = shape.slots * plan.columns * shape.rank * 2
    of_product = shared_bytes(product, plan.rows, plan.columns, plan.stages, plan.split)
    return of_product + slots + inner + b


def num_blocks(plan: Plan, product: Product, num_rows: int, shape: Shape | None) -> int:
    """Along x of the grid."""
    is_gated = product.epilogue == "gated"
    tiles = -(-(product.width >> is_gated) // (plan.columns >> is_gated))
    sums = 0 if shape is None else _sums(plan, product, num_rows, shape)
    return tiles * -(-num_rows // plan.rows) + sums


def _depths_beside_norm(depth: int) -> int:
    return min(_MOST_DEPTHS, cdiv(depth, _INPUTS))


def norm_and_sums(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, adapters: Adapters
) -> tuple[torch.Tensor, Adapters] | None:
    """rms_norm(x), and adapters with the sums for it, in one launch; None where it cannot be."""
    (num_rows, depth), device = x.shape, x.device
    if norm_weight.dtype != x.dtype or norm_weight.data_ptr() % 16:
        return None
    slots, each, _ = adapters.a.shape
    depths = _depths_beside_norm(depth)
    y = torch.empty((num_rows, depth), dtype=x.dtype, device=device)
    inner = torch.empty((depths, num_rows, each), dtype=torch.float32, device=device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=device)
    defines = {"K": depth, "EACH": each, "SLOTS": slots, "DEPTHS": depths}
    kernel = native.function("norm_sums", {"HALF": int(x.dtype == torch.float16), **defines})
    blocks = cdiv(num_rows, _ROWS) * slots * cdiv(each, _RANKS) * depths + num_rows
    stride = ctypes.c_longlong(x.stride(0))
    arguments = (x, stride, norm_weight, adapters.a, adapters.slots, y, inner, scales)
    native.launch(kernel, (blocks, 1, 1), _THREADS, (*arguments, num_rows, float(eps)))
    return y, replace(adapters, sums=Sums(inner, scales))


@functools.cache
def choose(alone: Plan, product: Product, num_rows: int, shape: Shape) -> Plan | None:
    """How it is cut, given the plan of the product alone; None where native/gemm.cu does not
    compute it."""
    if product.depth % 64 or shape.rank % 8 or shape.slots > _MOST_SLOTS or len(shape.ends) > 3:
        return None
    if any(end % 4 for end in shape.ends):
        return None
    known = measured(f"{shape.slots}x{shape.rank} adapters {product.key}", num_rows)
    if known is not None:
        return known
    plan = alone if alone.kind == "gemm" else tiles_of(product, num_rows)
    if product.has_norm:
        plan = replace(plan, fuses_norm=False)
        shape = replace(shape, depths=_depths_beside_norm(product.depth))
    return fitted(plan, product, num_rows, shape) if plan.kind == "gemm" else None


def fitted(plan: Plan, product: Product, num_rows: int, shape: Shape) -> Plan | None:
    """The plan with so many stages that all blocks find a place at a time, if fewer can help; None
    where not even three fit."""
    blocks = num_blocks(plan, product, num_rows, shape) * plan.split
    found: Plan | None = None
    for stages in range(3, plan.stages + 1):
        fewer = replace(plan, stages=stages)
        needed = all_shared_bytes(fewer, product, shape) + 1024
        places = _SHARED_OF_ALL // needed * num_processors()
        if needed > MOST_SHARED or (found is not None and stages > 4 and places < blocks):
            break
        found = fewer
    return found
