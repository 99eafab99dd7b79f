"""Descriptions of matrices for the GPU's copy engine, which a kernel takes as an argument (feed.cuh)."""

from __future__ import annotations

import ctypes
import functools

import torch

from . import _check, _driver, enter

_SIZE, _ALIGNMENT = 128, 64
_SWIZZLE_128, _PROMOTE_256 = 3, 3  # as cuda.h numbers them
_NUMBERS = {1: 0, 2: 1}  # by their bytes, the same
_ROW_BYTES = 128  # of a box: what the swizzle spans


def boxes(x: torch.Tensor, rows: int) -> bytes:
    """x [M, K] of one- or two-byte numbers as boxes of `rows` rows and 128 bytes of each, in the 128-byte swizzle; what
    lies outside is read as zeros. Rows begin at whole 16 bytes."""
    return _encoded(x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), x.element_size(), rows)


@functools.lru_cache(maxsize=4096)
def _encoded(
    address: int, num_rows: int, num_inputs: int, stride: int, size: int, rows: int
) -> bytes:
    enter(torch.cuda.current_device())
    memory = ctypes.create_string_buffer(_SIZE + _ALIGNMENT)
    start = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start), _NUMBERS[size], 2, ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(num_inputs, num_rows), (ctypes.c_uint64 * 1)(stride * size),
        (ctypes.c_uint32 * 2)(_ROW_BYTES // size, rows), (ctypes.c_uint32 * 2)(1, 1),
        0, _SWIZZLE_128, _PROMOTE_256, 0,
    )  # fmt: skip
    _check(code, "tensor map")
    return ctypes.string_at(start, _SIZE)
