"""Rows of dtypes that PaddlePaddle's kernels cannot move: their bits are moved instead.

Only _paddle.py imports this module; it prepares the process for PaddlePaddle.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import paddle

# Paddle's CPU kernels that select and place rows do not support these dtypes.
NARROW: dict[Any, Any] = {
    paddle.int8: np.int8,
    paddle.uint8: np.uint8,
    paddle.float8_e4m3fn: np.uint8,
    paddle.float8_e5m2: np.uint8,
    paddle.float16: np.int16,
    paddle.bfloat16: np.int16,
}


BYTES = tuple(dtype for dtype, carrier in NARROW.items() if np.dtype(carrier).itemsize == 1)


def bits_of(x: Any) -> np.ndarray:
    """The memory of a contiguous CPU tensor as an array of integers, valid as long as the tensor.

    DLPack would give read-only access to the same memory.
    """
    carrier: np.dtype[Any] = np.dtype(NARROW[x.dtype])
    size = int(x.size)
    if not size:
        return np.empty(x.shape, carrier)
    memory = (ctypes.c_uint8 * (size * carrier.itemsize)).from_address(x.data_ptr())
    return np.frombuffer(memoryview(memory), carrier, size).reshape(x.shape)


def words_of(x: Any) -> Any:
    """Rows of bytes on an accelerator as rows of int32 in the same memory, because kernels that
    move rows support few dtypes. None for any other tensor."""
    if x.dtype not in BYTES or x.place.is_cpu_place() or x.shape[-1] % 4:
        return None
    return x.view(paddle.int32) if x.is_contiguous() else None
