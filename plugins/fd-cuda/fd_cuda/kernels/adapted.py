"""Products with what adapters add to them, in one launch of native/gemm.cu: which cuts it has, and
which is chosen.

`plan.share` blocks that stand side by side in a cluster divide the first halves A of all adapters.
A larger share reads A less often, and smaller tiles read x more often.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import native
from .common import num_processors
from .plans import MOST_SHARED, Plan, Product, measured, shared_bytes

_MOST_SLOTS = 32  # a bit each; all are multiplied with
_WIDTHS = (16, 32, 64, 128)  # of A that a block multiplies with
_MOST_ROWS = 256  # of x
_CLUSTERS = [(i, j) for i in (1, 2, 4, 8) for j in (1, 2, 4, 8) if i * j <= 8]  # split, share
_NO_END = 2**31 - 1
_RECORD = struct.Struct("@3P3i4x")
# Bytes a second that one multiprocessor gets, and all of them, out of the second-level cache; and
# what a launch takes beside, with what each block of a cluster adds.
_OF_ONE, _OF_ALL = 65e9, 5.2e12
_LAUNCH_S, _MEMBER_S = 1.6e-6, 0.05e-6


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

    def record(self) -> bytes:
        """As native/gemm.cu reads it."""
        ends = (*self.ends[:-1], _NO_END, _NO_END)[:2]
        pointers = (self.a.data_ptr(), self.b.data_ptr(), self.slots.data_ptr())
        return _RECORD.pack(*pointers, len(self.ends), *ends)


def defines(plan: Plan, product: Product, shape: Shape) -> dict[str, int]:
    """What native/gemm.cu is compiled for."""
    return {
        "LORA": 1,
        "SLOTS": shape.slots,
        "RANK": shape.rank,
        "PARTS": _parts(plan, product, shape),
        "SHARE": plan.share,
        "INNER": _inner(plan, product, shape),
    }


def _parts(plan: Plan, product: Product, shape: Shape) -> int:
    """Parts whose A each cluster multiplies with: one where no cluster has outputs of two."""
    is_one = product.epilogue != "gated" and not any(
        end % (plan.columns * plan.share) for end in shape.ends[:-1]
    )
    return 1 if is_one else len(shape.ends)


def _inner(plan: Plan, product: Product, shape: Shape) -> int:
    """Rows of A that a block multiplies with; 0: too many."""
    each = shape.slots * _parts(plan, product, shape) * shape.rank
    return next((width for width in _WIDTHS if width * plan.share >= each), 0)


def all_shared_bytes(plan: Plan, product: Product, shape: Shape) -> int:
    """What a block keeps in shared memory."""
    inner, parts = _inner(plan, product, shape), _parts(plan, product, shape)
    tiles = shared_bytes(product, plan.rows, plan.columns, plan.stages, plan.split)
    own = plan.rows * 4 * (1 + parts * shape.rank) + shape.slots * plan.columns * shape.rank * 2
    return tiles + plan.stages * inner * 128 + own


def num_blocks(plan: Plan, product: Product, num_rows: int) -> int:
    """Along x of the grid: whole clusters."""
    is_gated = product.epilogue == "gated"
    tiles = -(-(product.width >> is_gated) // (plan.columns >> is_gated))
    return -(-tiles // plan.share) * plan.share * -(-num_rows // plan.rows)


@functools.cache
def choose(product: Product, num_rows: int, shape: Shape) -> Plan | None:
    """The cut that should be fastest; None where native/gemm.cu does not compute it."""
    if product.dtype not in ("bfloat16", "float16") or product.depth % 64:
        return None
    if num_rows > _MOST_ROWS or shape.rank % 8 or shape.slots > _MOST_SLOTS or len(shape.ends) > 3:
        return None
    if any(end % 4 for end in shape.ends) or not native.has_wgmma():
        return None
    if product.epilogue == "gated" and shape.ends != (product.width // 2, product.width):
        return None
    known = measured(f"{shape.slots}x{shape.rank} adapters {product.key}", num_rows)
    if known is not None:
        return known
    found = candidates(product, shape)
    return min(found, key=lambda plan: _seconds(plan, product, num_rows, shape), default=None)


def candidates(product: Product, shape: Shape) -> Iterator[Plan]:
    """Every cut whose tiles fit, with as many stages as are useful."""
    fuses_norm = product.has_norm and product.dtype != "float16"
    for columns in (32, 64, 128):
        for split, share in _CLUSTERS:
            most = max(3, -(-product.depth // 64 // split))
            for stages in sorted({most, *(s for s in (4, 6, 8) if s < most)}, reverse=True):
                plan = Plan("gemm", 8, 64, columns, stages, split, fuses_norm, share)
                if product.depth < 64 * split or not _inner(plan, product, shape):
                    continue
                if all_shared_bytes(plan, product, shape) <= MOST_SHARED:
                    yield plan


def _seconds(plan: Plan, product: Product, num_rows: int, shape: Shape) -> float:
    """What a launch should take: the tiles that blocks read, one multiprocessor after the other or
    all at once."""
    blocks = num_blocks(plan, product, num_rows) * plan.split
    rows = plan.rows + plan.columns + _inner(plan, product, shape)
    of_block = rows * product.depth * 2 / plan.split + shape.slots * plan.columns * shape.rank * 2
    of_one = -(-blocks // num_processors()) * of_block
    members = _MEMBER_S * plan.split * plan.share
    return _LAUNCH_S + members + max(of_one / _OF_ONE, blocks * of_block / _OF_ALL)
