"""How the native kernels of packed weights are specialized, and the shared memory that this
takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .quant_layout import CCQ, FP8_ROWS, INT4, INT8_ROWS, MXFP4, TRELLIS

MOST_SHARED: Final = 224 << 10  # bytes of a block, beside its table of up to 256 rows (wide.cuh)
MOST_DYNAMIC: Final = 227 << 10  # of a block without such a table
_ROW_BYTES: Final = 12  # of that table
_STORED: Final = 64  # rows that a warp of quant_persistent.cu stores at a time
BLOCK_PIECES: Final = 2  # of a warp's results, from which the copy engine stores quant_blocks.cu's
_MULTIPROCESSOR: Final = (
    228 << 10
)  # bytes of shared memory, of which a block takes 1,024 besides its own


@dataclass(frozen=True, slots=True)
class Few:
    """How quant_few.cu is specialized; serves 8 * tiles rows."""

    tiles: int
    slabs: int  # a warp's, of outputs
    warps: int
    ahead: int
    resident: int  # blocks that a multiprocessor holds

    @property
    def rows(self) -> int:
        """Rows of x that a block computes."""
        return 8 * self.tiles


@dataclass(frozen=True, slots=True)
class Tile:
    """How quant_tile.cu is specialized."""

    rows: int  # of x, of a block
    outputs: int
    split: int  # blocks that divide K
    stages: int
    unpackers: int  # warps
    teams: int  # of them, which take turns
    ahead: int  # own turns that weights are asked for ahead
    resident: int = 1  # blocks a multiprocessor should hold

    def __post_init__(self) -> None:
        # Readers order the writes of different teams to a stage too, but race detectors do not
        # follow that.
        if self.stages % self.teams:
            raise ValueError(f"{self.stages} stages are not divisible among {self.teams} teams")

    @property
    def groups(self) -> int:
        """Of four warps that multiply."""
        return self.outputs // 64

    @property
    def threads(self) -> int:
        """Those that multiply and those that unpack."""
        return self.groups * 128 + self.unpackers * 32


@dataclass(frozen=True, slots=True)
class Persistent:
    """How quant_persistent.cu is specialized."""

    rows: int  # of x, of a tile
    stages: int
    groups: int = 2  # of four warps, 64 outputs each
    split: int = 1  # blocks that divide K

    @property
    def box_rows(self) -> int:
        """Of the result, that the copy engine stores at a time; of experts, that it brings."""
        return 16 if self.rows % 32 else 32

    @property
    def threads(self) -> int:
        """Those that multiply, and four warps of which one feeds."""
        return self.groups * 128 + 128


@dataclass(frozen=True, slots=True)
class Blocks:
    """How quant_blocks.cu is specialized."""

    columns: int  # outputs of a tile, 128 or 256; gates and what belongs to them count apart
    stages: int
    split: int = 1  # blocks that divide K, of tiles of 128 outputs

    @property
    def rows(self) -> int:
        """Of x, of a tile: 64 of two groups of warps each."""
        return 128

    @property
    def wave(self) -> int:
        """Outputs that a group asks the matrix units for at a time: what it adds up has room for
        two such waves."""
        return 128 if self.columns == 128 else 64

    @property
    def threads(self) -> int:
        """Those that multiply, and four warps of which two feed."""
        return 2 * 128 + 128


@dataclass(frozen=True, slots=True)
class Grouped:
    """How quant_grouped.cu is specialized."""

    rows: int  # of x, of a block, at most
    groups: int  # of four warps
    stages: int
    held: int = 2  # slabs of a warp

    @property
    def slabs(self) -> int:
        """Of a tile; the trellis code has one for four of them."""
        return self.groups * 4 * self.held

    @property
    def threads(self) -> int:
        """Those that multiply, and four warps of which one feeds."""
        return self.groups * 128 + 128


Chosen = Few | Tile | Persistent | Blocks | Grouped | None  # None: the library


def slab_bytes(kind: int) -> int:
    """Of 16 outputs by 64 inputs; of the trellis code 64 outputs."""
    return 512 if kind in (INT4, MXFP4) else 256 if kind == CCQ else 1024


def group_bytes(kind: int, scaled: int) -> int:
    """Of a slab's scales that a turn brings; CCQ's are those of two turns, as the copy engine
    brings whole 16 bytes."""
    return 16 if kind == CCQ else 32 * scaled


def only_resident(shared: int, resident: int) -> int:
    """Bytes of shared memory of a block, so many that no more than `resident` have a place on a
    multiprocessor: blocks of the next kernel would crowd on those that have room first."""
    return max(shared, (_MULTIPROCESSOR // (resident + 1) // 1024 + 1) * 1024)


def few_shared(shape: Few, held: int, kind: int, scaled: int) -> int:
    """Bytes of shared memory of a block: inputs and weights of its warps, or their parts of the
    sums of `held` slabs."""
    groups = -(-held * group_bytes(kind, scaled) // 128) * 128
    ring = shape.ahead * (shape.rows * 128 + held * slab_bytes(kind) + groups)
    whole = shape.warps * max(ring, held * 16 * (shape.rows + 1) * 4)
    return only_resident(whole, shape.resident)


def end_shared(rows: int, outputs: int, split: int) -> int:
    """Bytes of shared memory that the end of a product takes: what other blocks send of the rows
    that a block finishes, two bytes an output that is stored, or, of gates with what belongs to
    them, four and a half float."""
    share = rows // min(split, rows // 8)
    return share * outputs * (4 * (split - 1) + 3)


def tile_shared(shape: Tile, kind: int, scaled: int) -> int:
    """Bytes of shared memory of a block: barriers, tiles of x and of weights, what the unpacking
    warps hold, or what the end takes where all of it was."""
    slabs = (
        shape.outputs // (64 if kind == TRELLIS else 16) * shape.teams
    )  # of a turn of every team
    held = slabs * (slab_bytes(kind) + group_bytes(kind, scaled))
    tiles = shape.stages * (shape.rows + shape.outputs) * 128 + shape.ahead * held
    end = end_shared(shape.rows, shape.outputs, shape.split)
    return 16 * shape.stages + 1024 + max(tiles, end)


def tile_room(shape: Tile) -> int:
    """Bytes of shared memory that a block may take, so that as many as it says find a place beside
    each other."""
    if shape.resident == 1:
        return MOST_SHARED
    return _MULTIPROCESSOR // shape.resident - 1024 - _ROW_BYTES * shape.rows


def persistent_shared(shape: Persistent, kind: int, *, by_block: bool = False) -> int:
    """Bytes of shared memory of a block of quant_persistent.cu: barriers, a ring of turns, two
    tables of rows for every group of warps, what warps are about to store; of blocks that divide K
    in their place what the end takes where the ring was."""
    warps, by_rows = shape.groups * 4, kind in (INT8_ROWS, FP8_ROWS)
    weights = shape.groups * 64 * 128 if by_rows else warps * slab_bytes(kind)
    line = (shape.rows + 2) * 4 if by_block else 0
    ring = shape.stages * (shape.rows * 128 + weights + line)
    if shape.split > 1:
        end = end_shared(shape.rows, shape.groups * 64, shape.split)
        return 16 * shape.stages + 1024 + max(ring, end)
    tables = shape.groups * 2 * shape.rows * 8
    return 16 * shape.stages + 1024 + ring + tables + warps * _STORED * 32


def boxes(shape: Persistent, kind: int, *, by_block: bool = False) -> tuple[int, int]:
    """Where the copy engine stores results: how many pieces of them a group of warps has, two,
    which find a place where its warps have theirs without it, or three, and bytes of shared memory
    of the block."""
    shared = persistent_shared(shape, kind, by_block=by_block)
    more = shared + shape.groups * shape.box_rows * 128
    return (3, more) if more <= MOST_DYNAMIC else (2, shared)


def persistent(rows: int, kind: int, groups: int = 2, split: int = 1) -> Persistent:
    """With as many turns ahead, to eight, as there is shared memory for."""
    shapes = (Persistent(rows, stages, groups, split) for stages in range(8, 2, -1))
    most = MOST_DYNAMIC if split == 1 else MOST_SHARED
    return next(shape for shape in shapes if persistent_shared(shape, kind) <= most)


def grouped_shared(shape: Grouped, kind: int, *, is_int8: bool) -> int:
    """Bytes of shared memory of a block of quant_grouped.cu: barriers, a ring of steps of two
    turns, what warps are about to store."""
    weights = 2 * slab_bytes(kind) // (4 if kind == TRELLIS else 1) + (64 if kind == MXFP4 else 0)
    step = shape.rows * 128 * (1 if is_int8 else 2) + shape.slabs * weights
    return 16 * shape.stages + 1024 + shape.stages * step + shape.groups * 4 * shape.rows * 32


def blocks_shared(shape: Blocks) -> int:
    """Bytes of shared memory of a block of quant_blocks.cu: barriers and scales of turns, a ring of
    turns that begins at whole 1,024 bytes, pieces of results that warps are about to store, sums of
    these that other blocks send."""
    scales = (shape.rows + 2) * 4
    ring = shape.stages * (shape.rows + shape.columns) * 128
    sent = shape.rows // shape.split * (shape.split - 1) * shape.columns * 4
    start = -(-shape.stages * (16 + scales) // 1024) * 1024
    return start + ring + 8 * BLOCK_PIECES * 16 * 128 + sent


def blocks(columns: int = 128, split: int = 1) -> Blocks:
    """With as many turns ahead, to eight, as there is shared memory for."""
    shapes = (Blocks(columns, stages, split) for stages in range(8, 2, -1))
    return next(shape for shape in shapes if blocks_shared(shape) <= MOST_DYNAMIC)
