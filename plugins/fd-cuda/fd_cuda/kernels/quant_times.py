"""Which tiles multiply a dense layer first: a kernel's time as a sum of measured times of its turns
and of its ends.

Microseconds, fitted to 103 and 282 layers and numbers of rows each (one H200, 2026-11-30).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import inf, log2
from typing import Final

_SHARES: Final = {2: 1.0, 4: 0.8, 8: 0.5}


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Of tiles of one kind of operands."""

    inputs: int  # of a turn
    # Of a turn where every multiprocessor has a tile: by the tile's rows and its outputs in 64.
    turns: Mapping[tuple[int, int], float]
    splits: tuple[int, ...]  # in how many parts K may be divided
    idle: float  # part of a turn that would not be there if all other multiprocessors had no tile
    absent: float  # more of a turn, for each row that a tile does not have
    start: float  # once
    end: float  # of a tile, and of each of its rows
    end_row: float
    share: float  # for each halving of K, and of each row of a tile
    share_row: float


@functools.cache
def quickest(
    times: Times, outputs: int, inputs: int, rows: int, cores: int, more: float = 0.0
) -> tuple[float, int, int, int]:
    """The time of the tiles that should be done first; their rows, their outputs in 64, and in how
    many parts K is divided. `more`: of each turn."""
    turns = -(-inputs // times.inputs)

    def taken(block: int, groups: int, split: int) -> float:
        tiles = -(-outputs // (64 * groups)) * -(-rows // block)
        # Blocks that divide K have to start together; clusters of more leave more places empty. A
        # second round of narrow tiles took longer than the first one.
        share = _SHARES[split] if split > 1 else 1.0 if groups == 1 else inf
        if tiles * split > share * cores:
            return inf
        busy = min(1.0, tiles * split / cores)
        turn = times.turns[block, groups] * (1 - times.idle * (1 - busy))
        turn += times.absent * (-rows % block) + more
        end = times.end + times.end_row * block
        end += log2(split) * (times.share + times.share_row * block)
        return times.start + -(-tiles // cores) * (-(-turns // split) * turn + end)

    shapes = ((*tile, split) for tile, split in product(times.turns, times.splits))
    return min((taken(*shape), *shape) for shape in shapes)


# Weights that are unpacked in registers. The copy engine brings 256 rows too slowly for 64 outputs.
UNPACKED: Final = Times(
    64,
    {
        (32, 1): 0.196, (32, 2): 0.259, (64, 1): 0.191, (64, 2): 0.294, (128, 1): 0.224,
        (128, 2): 0.37, (160, 1): 0.237, (160, 2): 0.403, (256, 2): 0.659,
    },
    (1, 2, 4, 8), 0.0, 0.00037, 0.0, 1.07, 0.0054, 1.03, 0.0089,
)  # fmt: skip
GROUPS_MORE: Final = 0.1  # of a turn, where groups of inputs have scales
# fp8 numbers with scales of blocks; tiles of 128 rows are those of quant_blocks.cu.
BY_BLOCKS: Final = Times(
    128,
    {
        (16, 1): 0.194, (16, 2): 0.311, (32, 1): 0.215, (32, 2): 0.337, (64, 1): 0.273,
        (64, 2): 0.38, (128, 2): 0.468, (128, 4): 0.869,
    },
    (1, 2), 0.363, 0.00029, 2.27, 0.0, 0.00025, 0.434, 0.014,
)  # fmt: skip


def library_by_blocks(outputs: int, inputs: int, rows: int, cores: int) -> float:
    """Of cuBLAS with scales of blocks: tiles of 128 by 128."""
    rounds = -(-(-(-outputs // 128) * -(-rows // 128)) // cores)
    return 1.39 + rounds * (-(-inputs // 128) * 0.394 + 1.81)


def library_unpacked(stored: int, numbers: int, rows: int) -> float:
    """Of unpacking a weight of so many bytes and numbers, and of cuBLAS after it: bytes that it
    moves, and multiplications."""
    unpacked = (stored + 2 * numbers) / 3.3e6
    return unpacked + max(numbers * rows / 3.75e8, numbers * 2 / 3.3e6) + 5.0
