"""From a rotated weight to strands: scales, and error feedback from the last inputs to the first.

With H the second moments of the inputs and H = L D L^T (L unit block lower triangular, blocks of a
tile's 8 inputs), rounding block k to W_k + sum over j > k of (W_j - Q_j) L_jk makes the error that
matters, tr((W - Q) H (W - Q)^T), the sum of the blocks' own.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .code import STRAND, TILE_COLUMNS, TILE_ROWS, pack_states, scaled_codebook
from .encoder import Progress, encode

DAMPING: Final = 0.01  # of the mean of the diagonal
_TINY: Final = 1e-12


def to_strands(rows: np.ndarray) -> np.ndarray:
    """[N, K] (multiples of 64 and 8) to [N/64, K/8, 512]."""
    tall, wide = rows.shape[0] // TILE_ROWS, rows.shape[1] // TILE_COLUMNS
    tiles = rows.reshape(tall, TILE_ROWS, wide, TILE_COLUMNS).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(tiles).reshape(tall, wide, STRAND)


def from_strands(strands: np.ndarray) -> np.ndarray:
    """The inverse of to_strands."""
    tall, wide = strands.shape[:2]
    tiles = strands.reshape(tall, wide, TILE_ROWS, TILE_COLUMNS).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(tiles).reshape(tall * TILE_ROWS, wide * TILE_COLUMNS)


def quantize_rows(
    rows: np.ndarray,
    bits: int,
    hessian: np.ndarray | None = None,
    *,
    xp: Any = None,
    device: str = "",
    progress: Progress | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(words [ceil(N/64), K/8, 16 bits] int32, scales [N] float16) of a rotated weight [N, K]."""
    count, columns = rows.shape
    padded = np.zeros((-(-count // TILE_ROWS) * TILE_ROWS, columns), np.float32)
    padded[:count] = rows
    scale = np.sqrt((padded.astype(np.float64) ** 2).mean(axis=1)).astype(np.float32)
    scale[scale < _TINY] = 1.0
    unit = padded / scale[:, None]

    def search(strands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        states = encode(strands, bits, xp=xp, device=device, progress=progress)
        found = scaled_codebook(bits)[states].reshape(len(strands), STRAND)
        return pack_states(states, bits), found

    if hessian is None:
        strands = to_strands(unit)
        words, found = search(strands.reshape(-1, STRAND))
        words = words.reshape(*strands.shape[:2], -1)
        rounded = from_strands(found.reshape(strands.shape))
        moments = None
    else:
        moments = _damped(hessian)
        words, rounded = _with_feedback(unit, moments, search)
    return words, _refit(padded, rounded, scale, moments)[:count].astype(np.float16)


def _damped(hessian: np.ndarray) -> np.ndarray:
    h = np.array(hessian, np.float64)
    mean = max(float(np.diagonal(h).mean()), _TINY)
    h[np.diag_indices_from(h)] += DAMPING * mean
    return h


def _with_feedback(
    unit: np.ndarray, moments: np.ndarray, search: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Words and rounded rows; blocks of 8 inputs from the last to the first."""
    tall, wide = unit.shape[0] // TILE_ROWS, unit.shape[1] // TILE_COLUMNS
    lower = np.linalg.cholesky(moments)
    rounded = np.zeros_like(unit)
    words: list[np.ndarray] = []
    for block in range(wide - 1, -1, -1):
        own = slice(block * TILE_COLUMNS, (block + 1) * TILE_COLUMNS)
        behind = slice((block + 1) * TILE_COLUMNS, None)
        target = unit[:, own]
        if block < wide - 1:
            factor = np.linalg.solve(lower[own, own].T, lower[behind, own].T).T
            target = target + ((unit[:, behind] - rounded[:, behind]) @ factor).astype(np.float32)
        strands = np.ascontiguousarray(target).reshape(tall, STRAND)
        packed, found = search(strands)
        rounded[:, own] = found.reshape(tall * TILE_ROWS, TILE_COLUMNS)
        words.append(packed)
    return np.stack(words[::-1], axis=1), rounded


def _refit(
    rows: np.ndarray, rounded: np.ndarray, scale: np.ndarray, moments: np.ndarray | None
) -> np.ndarray:
    """Scales [N] with the least error for what was found."""
    weighted = rounded if moments is None else rounded @ moments
    above = (rows.astype(np.float64) * weighted).sum(axis=1)
    below = (rounded.astype(np.float64) * weighted).sum(axis=1)
    fitted = np.where(below > _TINY, above / np.maximum(below, _TINY), scale)
    return np.where(fitted > 0, fitted, scale)
