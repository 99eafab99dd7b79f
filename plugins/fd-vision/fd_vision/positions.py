"""Positions on three axes (time, row, column) by the rule that the models were trained with.

Text advances all axes together. A picture at position s has s plus the place of each vector in its
grid, and so has a video; what follows goes on at the largest position so far plus 1. transformers
goes on at s plus the longer side instead, which is the same but for videos that last longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of text, or all vectors of one grid."""

    count: int
    grid: tuple[int, int, int] | None = None  # of vectors: in time, rows, columns; None: text
    time_step: float = 1.0  # positions from one vector to the next one in time


def three_axes(runs: Iterable[Run]) -> tuple[np.ndarray, int]:
    """[3, num_tokens] int32, and what to add to the index of a token after them."""
    parts: list[np.ndarray] = [np.zeros((3, 0), dtype=np.int64)]
    start = 0
    for run in runs:
        if run.grid is None:
            part = np.broadcast_to(np.arange(run.count), (3, run.count)) + start
        else:
            part = np.indices(run.grid).reshape(3, -1)
            # Whole positions: of the time, not of each step.
            part[0] = np.floor(part[0] * run.time_step).astype(np.int64)
            part = part + start
        if part.shape[1]:
            start = int(part.max()) + 1
            parts.append(part)
    found = np.concatenate(parts, axis=1)
    return np.ascontiguousarray(found, dtype=np.int32), start - found.shape[1]
