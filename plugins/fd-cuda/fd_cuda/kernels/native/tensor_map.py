"""Descriptions of matrices for the GPU's copy engine, which a kernel takes as an argument (feed.cuh)."""

from __future__ import annotations

import ctypes
import functools

import torch

from . import _check, _driver, enter

_SIZE, _ALIGNMENT = 128, 64
_TWO_BYTES, _SWIZZLE_128, _PROMOTE_256 = 1, 3, 3  # as cuda.h numbers them
_INPUTS = 64  # of a row of a box: what the swizzle spans


def boxes(x: torch.Tensor, rows: int) -> bytes:
    """x [M, K] of two-byte numbers as boxes of `rows` rows and 64 inputs in the 128-byte swizzle; what lies
    outside is read as zeros. Rows begin at whole 16 bytes."""
    return _encoded(x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), rows)


@functools.lru_cache(maxsize=4096)
def _encoded(address: int, num_rows: int, num_inputs: int, stride: int, rows: int) -> bytes:
    enter(torch.cuda.current_device())
    memory = ctypes.create_string_buffer(_SIZE + _ALIGNMENT)
    start = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start), _TWO_BYTES, 2, ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(num_inputs, num_rows), (ctypes.c_uint64 * 1)(stride * 2),
        (ctypes.c_uint32 * 2)(_INPUTS, rows), (ctypes.c_uint32 * 2)(1, 1),
        0, _SWIZZLE_128, _PROMOTE_256, 0,
    )  # fmt: skip
    _check(code, "tensor map")
    return ctypes.string_at(start, _SIZE)
