"""How the native kernels of packed weights are specialized, and the shared memory that this takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .common import num_processors
from .quant_layout import CCQ, INT4

_MULTIPROCESSOR: Final = 228 << 10  # bytes of shared memory, of which a block takes 1,024 besides its own


@dataclass(frozen=True, slots=True)
class Gemv:
    """How quant_gemv.cu is specialized; serves 8 * tiles rows."""

    tiles: int
    slabs: int  # a warp's, of outputs
    warps: int
    ahead: int
    resident: int  # blocks a multiprocessor should hold

    @property
    def rows(self) -> int:
        """Rows of x that a block computes."""
        return 8 * self.tiles

    def __str__(self) -> str:
        return f"gemv {self.tiles}t {self.slabs}s {self.warps}w {self.ahead}a {self.resident}r"


@dataclass(frozen=True, slots=True)
class Few(Gemv):
    """How quant_few.cu is specialized; as many blocks as `resident` says are all that a multiprocessor has place for."""

    def __str__(self) -> str:
        return f"few {self.tiles}t {self.slabs}s {self.warps}w {self.ahead}a {self.resident}r"


@dataclass(frozen=True, slots=True)
class Gemm:
    """How quant_gemm.cu is specialized."""

    rows: int  # of x, of a block
    groups: int  # of four warps
    split: int  # blocks that divide K
    stages: int
    ahead: int  # turns that weights are asked for ahead, in registers; 0 for through shared memory
    resident: int = 1  # blocks a multiprocessor should hold

    def __str__(self) -> str:
        tile = f"{self.rows}x{self.groups * 64}"
        return f"gemm {tile} /{self.split} {self.stages}st {self.ahead}a {self.resident}r"


@dataclass(frozen=True, slots=True)
class RowGemm:
    """How quant_rows.cu is specialized."""

    rows: int  # of x, of a block
    groups: int  # of four warps, 64 outputs each
    split: int  # blocks that divide K
    stages: int

    def __str__(self) -> str:
        return f"rows {self.rows}x{self.groups * 64} /{self.split} {self.stages}st"


@dataclass(frozen=True, slots=True)
class Pipe:
    """How quant_pipe.cu is specialized."""

    rows: int  # of x, of a block
    groups: int  # of four warps, 64 outputs each
    split: int  # blocks that divide K
    stages: int
    resident: int = 1  # blocks a multiprocessor should hold

    @property
    def threads(self) -> int:
        """Those that multiply and those that feed."""
        return self.groups * 128 + (128 if self.rows == 256 else 32)

    def __str__(self) -> str:
        tile = f"{self.rows}x{self.groups * 64}"
        return f"pipe {tile} /{self.split} {self.stages}st {self.resident}r"


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

    @property
    def threads(self) -> int:
        """Those that multiply and those that unpack."""
        return self.rows * 2 + self.unpackers * 32

    @property
    def slabs(self) -> int:
        """Of a warp and turn."""
        return self.outputs // 16 * self.teams // self.unpackers

    def __str__(self) -> str:
        tile = f"{self.rows}x{self.outputs}"
        return (
            f"tile {tile} /{self.split} {self.stages}st {self.unpackers}u{self.teams} {self.ahead}a"
        )


Shape = Gemv | Gemm | Pipe | Tile


def slab_bytes(kind: int) -> int:
    """Of 16 outputs by 64 inputs."""
    return 512 if kind == INT4 else 256 if kind == CCQ else 1024


def group_bytes(kind: int, scaled: int) -> int:
    """Of a slab's scales that a turn brings; CCQ's are those of two turns, as the copy engine brings whole 16 bytes."""
    return 16 if kind == CCQ else 32 * scaled


def only_resident(shared: int, resident: int) -> int:
    """So many bytes of shared memory for a block, or more, that no more blocks than these have a place on a multiprocessor: blocks
    of the next kernel that begin where there is room crowd on some of them."""
    return max(shared, (_MULTIPROCESSOR // (resident + 1) // 1024 + 1) * 1024)


def blocks_with_places(blocks: int, resident: int) -> int:
    """So many blocks, and idle ones, that every multiprocessor with places for two has one of this kernel and one of the next,
    whose weights come meanwhile."""
    processors = num_processors()
    return processors if resident == 2 and processors * 3 // 4 <= blocks < processors else blocks


def gemv_shared(shape: Gemv, held: int, kind: int, scaled: int) -> int:
    """Bytes of shared memory of a block: inputs of its warps, of Few weights too, or their parts of the sums of `held`
    slabs."""
    is_few = isinstance(shape, Few)
    weights = held * (slab_bytes(kind) + group_bytes(kind, scaled)) if is_few else 0
    ring = shape.ahead * (shape.rows * 128 + weights)
    whole = shape.warps * max(ring, held * 16 * (shape.rows + 1) * 4)
    return only_resident(whole, shape.resident) if is_few else whole


def gemm_shared(shape: Gemm, kind: int, *, paired: bool) -> int:
    """Bytes of shared memory of a block: tiles of x, and of weights where they take that way, parts of the sums,
    what aligning takes."""
    held = shape.groups * (1 + paired)
    weights = 0 if shape.ahead else held * (2048 if kind == INT4 else 4096)
    tiles = shape.stages * (shape.rows * 128 + weights)
    parts = shape.rows * (held * 64 + 4) * 4
    is_apart = shape.split > 1 and shape.ahead > 0
    return 1024 + (tiles + parts if is_apart else max(tiles, parts))


def pipe_shared(shape: Pipe, kind: int, scaled: int) -> int:
    """Bytes of shared memory of a block: barriers, tiles of x and of weights, or parts of the sums where these were."""
    warps = shape.groups * 4
    weights = warps * slab_bytes(kind) + -(-warps * group_bytes(kind, scaled) // 1024) * 1024
    tiles = shape.stages * (shape.rows * 128 + weights)
    parts = shape.rows * (shape.groups * 64 + 4) * 4
    return 16 * shape.stages + 1024 + max(tiles, parts)


def tile_shared(shape: Tile, kind: int, scaled: int) -> int:
    """Bytes of shared memory of a block: barriers, tiles of x and of weights, what the unpacking warps hold, or parts
    of the sums where all of it was."""
    held = shape.slabs * (slab_bytes(kind) + group_bytes(kind, scaled))
    tiles = shape.stages * (shape.rows + shape.outputs) * 128 + shape.unpackers * shape.ahead * held
    parts = shape.rows * (shape.outputs + 8) * 4
    return 16 * shape.stages + 1024 + max(tiles, parts)


def rows_shared(shape: RowGemm, *, by_block: bool) -> int:
    """Bytes of shared memory of a block of quant_rows.cu: tiles, parts of the sums, scales of turns, what
    aligning takes."""
    tiles = shape.stages * (shape.groups * 64 + shape.rows) * 128
    parts = shape.rows * (shape.groups * 64 + 4) * 4
    factors = shape.stages * shape.rows * 4 if by_block else 0
    return 1024 + (tiles + parts if shape.split > 1 else max(tiles, parts)) + factors
