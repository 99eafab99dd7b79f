"""Rounding to int4 with error feedback (GPTQ, arXiv 2210.17323): the error of each input is
compensated by the inputs that are rounded after it, weighted by calibration statistics.

On the host in float64: it runs once per model and needs a factorisation that not every tensor
library has.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fastdeploy_core.contracts.quant_formats import INT4_OFFSET

from .rounding import CLIPS, INT4_BOUND

DAMPING: Final = 0.01  # of the mean of the diagonal
_BLOCK: Final = 128  # inputs between updates of all later inputs


def inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """Upper Cholesky factor of the damped inverse of a second-moment matrix [K, K]."""
    h = np.array(hessian, np.float64)
    diagonal = np.diagonal(h).copy()
    unseen = diagonal <= 0
    h[unseen, unseen] = 1.0
    h[np.diag_indices_from(h)] += DAMPING * max(float(diagonal.mean()), 1e-12)
    inverse = np.linalg.inv(h)
    return np.linalg.cholesky(inverse).T


def clipped_scale(groups: np.ndarray) -> np.ndarray:
    """Scales [N] of one group of inputs [g, N]: the clip with the least squared error."""
    peak = np.abs(groups).max(axis=0)
    peak[peak < 1e-12] = INT4_BOUND
    best = np.full(groups.shape[1], np.inf)
    scale = np.empty(groups.shape[1])
    for clip in CLIPS:
        tried = peak * (clip / INT4_BOUND)
        rounded = np.clip(np.round(groups / tried), -INT4_OFFSET, INT4_BOUND)
        error = ((rounded * tried - groups) ** 2).sum(axis=0)
        better = error < best
        best[better], scale[better] = error[better], tried[better]
    return scale


def quantize_int4_with_feedback(
    weight: np.ndarray, hessian: np.ndarray, group_size: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """([N, K] uint8 offset by 8, scales [N, G] float32) of weight [N, K]."""
    # Inputs are the first dimension, so that an update changes contiguous memory.
    w = np.array(weight.T, np.float64, order="C")
    count, rows = w.shape
    group = group_size or count
    factor = inverse_factor(hessian)
    numbers = np.empty((count, rows), np.uint8)
    scales = np.empty((-(-count // group), rows))
    if not group_size:
        scales[0] = clipped_scale(w)
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        errors = np.empty((stop - start, rows))
        for column in range(start, stop):
            if group_size and column % group == 0:
                scales[column // group] = clipped_scale(w[column : column + group])
            scale = scales[column // group]
            value = np.clip(np.round(w[column] / scale), -INT4_OFFSET, INT4_BOUND)
            numbers[column] = (value + INT4_OFFSET).astype(np.uint8)
            error = (w[column] - value * scale) / factor[column, column]
            w[column:stop] -= np.outer(factor[column, column:stop], error)
            errors[column - start] = error
        w[stop:] -= factor[start:stop, stop:].T @ errors
    return np.ascontiguousarray(numbers.T), np.ascontiguousarray(scales.T).astype(np.float32)
