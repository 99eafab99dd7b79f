"""Which kernel computes a product: rules by shape and number of rows, from what was fastest on an
H200 for some forty shapes (NOTES.md)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Final

from . import native
from .common import cdiv, num_processors

# Numbers of rows that are told apart; others take the next larger one's choice.
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDEST: Final = 1 << 16  # a vocabulary: cuBLAS reads so many rows at the memory's speed
MOST_SHARED: Final = 227 * 1024  # bytes of shared memory a block may have
_FEW: Final = 64  # rows up to which cuBLAS is hardly ever faster
_MOST_WORK: Final = 768 << 20  # of more rows: numbers of the weight times rows
_LARGE: Final = 20 << 20  # numbers of a weight for which wide tiles are better
_MOST_RESIDENT: Final = 12  # tiles of a share of K that stay in shared memory together


@dataclass(frozen=True, slots=True)
class Product:
    """What is computed: one of "plain", "add", "gated", after a norm or not."""

    epilogue: str
    has_norm: bool
    width: int  # N, rows of the weight
    depth: int  # K
    dtype: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How. "library" is cuBLAS with Triton kernels around it; only "gemv" norms in the product."""

    kind: str = "library"  # or "gemv", "gemm"
    warps: int = 8  # gemv
    rows: int = 64  # gemm: BM
    columns: int = 128  # BN
    stages: int = 4
    split: int = 1
    # gemm: lets the next kernel start only when x is there, which that one reads.
    is_deferring: bool = field(default=False, kw_only=True)


LIBRARY: Final = Plan()


def fits(plan: Plan, product: Product, num_rows: int) -> bool:
    """Whether the plan can compute it."""
    if plan.kind == "library":
        return True
    if product.dtype not in ("bfloat16", "float16") or product.depth % 64:
        return False
    if plan.kind == "gemv":
        if product.has_norm and product.dtype == "float16":
            return False  # x times the norm's weight may not fit before it is divided
        return num_rows <= 16 and product.depth % (32 * plan.warps) == 0
    return product.width % 8 == 0 and native.has_wgmma()


@functools.cache
def choose(product: Product, num_rows: int) -> Plan:
    """The plan for so many rows of x."""
    if num_rows > ROWS[-1] or product.width >= WIDEST or not native.available():
        return LIBRARY
    num_rows = next(size for size in ROWS if size >= num_rows)
    blocks = cdiv(product.width, 16)
    warps = 4
    if blocks <= num_processors():
        warps = 16
    elif blocks <= 2 * num_processors() and num_rows <= 8:
        warps = 8
    while warps:
        plan = Plan("gemv", warps=warps)
        if fits(plan, product, num_rows):
            return plan
        warps //= 2
    return tiles_of(product, num_rows)


def tiles_of(product: Product, num_rows: int) -> Plan:
    """Of native/gemm.cu: blocks that fill the multiprocessors once, as far as parts of K do; the
    library where it is faster."""
    numbers, processors = product.width * product.depth, num_processors()
    if num_rows > ROWS[-1] or not native.available():
        return LIBRARY
    if num_rows > _FEW and numbers * num_rows > _MOST_WORK:
        return LIBRARY
    rows, columns, places = 64, 64, processors
    if num_rows > _FEW:
        rows, columns = 128, 32
        blocks, _ = _cut(product, num_rows, rows, columns, places)
        if blocks > places or 2 * blocks <= places:  # clusters of four may fill more
            columns = 64
    else:
        filled = {}
        for columns in (64, 128):
            blocks, split = _cut(product, num_rows, rows, columns, places)
            filled[columns] = blocks / cdiv(blocks, places), split
        is_large, wide, narrow = numbers >= _LARGE, filled[128][0], filled[64][0]
        columns = 128 if wide > narrow or (is_large and wide == narrow) else 64
        if columns == 64 and num_rows > 32 and filled[64][1] < 4 and not is_large:
            columns, places = 32, 2 * processors
    blocks, split = _cut(product, num_rows, rows, columns, places)
    share = cdiv(product.depth // 64, split)
    wanted = max(3, share if share <= _MOST_RESIDENT else 8)
    room = MOST_SHARED if blocks <= processors else MOST_SHARED // 2 - 1024  # two side by side
    stages = next(
        (
            stages
            for stages in (wanted, 8, 4)
            if stages <= wanted and shared_bytes(rows, columns, stages, split) <= room
        ),
        3,
    )
    plan = Plan("gemm", 8, rows, columns, stages, split)
    return plan if fits(plan, product, num_rows) else LIBRARY


def _cut(product: Product, num_rows: int, rows: int, columns: int, places: int) -> tuple[int, int]:
    """Blocks, for so many that can run at a time, and parts of K among them."""
    tiles, split = cdiv(product.width, columns) * cdiv(num_rows, rows), 1
    while split < 4 and product.depth >= 128 * split:
        # Clusters of four do not reach all multiprocessors.
        if tiles * split * 2 > places * (1 if split == 1 else 0.9):
            break
        split *= 2
    return tiles * split, split


def shared_bytes(rows: int, columns: int, stages: int, split: int) -> int:
    """What a block of native/gemm.cu keeps in shared memory: tiles, what aligning them takes, parts
    of the sums."""
    parts = rows * (columns + 4) * 4 if split > 1 else 0
    return stages * (rows + columns) * 128 + 1024 + parts
