"""Rotation of the last dimension: random signs, then orthonormal Hadamard transforms of blocks.

It spreads outliers over a whole block, so that weights of any distribution look Gaussian to the
code, and inputs have no outliers left to lose when they are rounded.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

MIN_BLOCK: Final = 128
_MAX_FACTOR: Final = 64  # matrices up to this size are multiplied at once


def block_size(count: int, most: int = 0) -> int:
    """The largest power of two that divides a dimension, at most `most` where that is given."""
    block = count & -count
    while most and block > most:
        block //= 2
    return block


def random_signs(count: int, name: str, seed: int) -> np.ndarray:
    """[count] int8 of +1 and -1, the same for the same name and seed everywhere."""
    stream = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return (stream.integers(0, 2, count) * 2 - 1).astype(np.int8)


@lru_cache(maxsize=8)
def _matrix(size: int) -> np.ndarray:
    """Orthonormal, symmetric."""
    h = np.ones((1, 1), np.float32)
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h * np.float32(size**-0.5)


def transform(x: Tensor, block: int) -> Tensor:
    """Hadamard transforms of blocks of the last dimension of x [rows, K]; its own inverse."""
    xp = namespace(x)
    shape = list(x.shape)
    # H of a * b is the Kronecker product of H of a and H of b: one factor after the other, each in
    # turn brought to the last place.
    factors, left = [], block
    while left > 1:
        factors.append(min(left, _MAX_FACTOR))
        left //= factors[-1]
    y = x.reshape([-1, *reversed(factors)]) if factors else x
    for place, size in enumerate(factors):
        dim = len(factors) - place
        matrix = xp.to_device(xp.from_numpy(_matrix(size).copy()), x.device)
        last = len(factors)
        y = xp.matmul(y if dim == last else y.transpose(dim, last), matrix)
        if dim != last:
            y = y.transpose(dim, last)
    return y.reshape(shape)


def rotate(x: Tensor, signs: Tensor, block: int) -> Tensor:
    """x [rows, K] float32 times the signs, then transformed."""
    return transform(x * signs.float(), block)


def rotate_back(x: Tensor, signs: Tensor, block: int) -> Tensor:
    """The inverse of rotate."""
    return transform(x, block) * signs.float()


def rotated_moments(xp: Any, hessian: np.ndarray, signs: np.ndarray, block: int) -> np.ndarray:
    """R H R^T for second moments H [K, K] of inputs that rotate as above."""
    half = rotate(xp.from_numpy(np.array(hessian, np.float32)), xp.from_numpy(signs.copy()), block)
    both = rotate(half.transpose(0, 1).contiguous(), xp.from_numpy(signs.copy()), block)
    return np.array(xp.to_numpy(both), np.float64)
