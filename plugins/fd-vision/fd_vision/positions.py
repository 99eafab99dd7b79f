"""Positions on three axes (time, row, column) by the rule that Qwen's models were trained with.

Text advances all axes together. A picture at position s has s plus the place of each vector in its
grid; what follows goes on at the largest position so far plus 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Run = tuple[int, tuple[int, int, int] | None]  # tokens, and the grid of vectors that they are


def three_axes(runs: Iterable[Run]) -> tuple[np.ndarray, int]:
    """[3, num_tokens] int32, and what to add to the index of a token behind them."""
    parts: list[np.ndarray] = [np.zeros((3, 0), dtype=np.int64)]
    start = 0
    for count, grid in runs:
        if grid is None:
            part = np.broadcast_to(np.arange(count), (3, count)) + start
        else:
            part = np.indices(grid).reshape(3, -1) + start
        if part.shape[1]:
            start = int(part.max()) + 1
            parts.append(part)
    found = np.concatenate(parts, axis=1)
    return np.ascontiguousarray(found, dtype=np.int32), start - found.shape[1]
