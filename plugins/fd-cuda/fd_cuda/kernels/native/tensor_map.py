"""Descriptions of matrices for the GPU's copy engine, which a kernel takes as an argument (feed.cuh)."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from . import _check, _driver, enter

_SIZE, _ALIGNMENT = 128, 64
_PROMOTE_256 = 3  # as cuda.h numbers it
_INPUTS = 64  # of a row of a box: what the swizzle spans


@dataclass(frozen=True, slots=True)
class _Kind:
    """Of elements, as cuda.h numbers types and swizzles."""

    dtype: int
    size: int
    swizzle: int


_HALVES, _WORDS = _Kind(1, 2, 3), _Kind(2, 4, 0)


def boxes(x: torch.Tensor, rows: int) -> bytes:
    """x [M, K] of two-byte numbers as boxes of `rows` rows and 64 inputs in the 128-byte swizzle; what lies
    outside is read as zeros. Rows begin at whole 16 bytes."""
    return _encoded(_HALVES, x.data_ptr(), *x.shape, x.stride(0), rows, _INPUTS)


def words(table: torch.Tensor, num_rows: int, rows: int, width: int) -> bytes:
    """Memory of `num_rows` rows side by side, each of whole 16 bytes, as boxes of `rows` rows and `width` words of four
    bytes that lie row after row."""
    row = table.numel() * table.element_size() // num_rows // 4
    return _encoded(_WORDS, table.data_ptr(), num_rows, row, row, rows, width)


@functools.lru_cache(maxsize=4096)
def _encoded(
    kind: _Kind, address: int, num_rows: int, num_inputs: int, stride: int, rows: int, inputs: int
) -> bytes:
    enter(torch.cuda.current_device())
    memory = ctypes.create_string_buffer(_SIZE + _ALIGNMENT)
    start = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start), kind.dtype, 2, ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(num_inputs, num_rows), (ctypes.c_uint64 * 1)(stride * kind.size),
        (ctypes.c_uint32 * 2)(inputs, rows), (ctypes.c_uint32 * 2)(1, 1),
        0, kind.swizzle, _PROMOTE_256, 0,
    )  # fmt: skip
    _check(code, "tensor map")
    return ctypes.string_at(start, _SIZE)
