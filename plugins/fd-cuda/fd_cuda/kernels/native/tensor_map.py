"""Descriptions of matrices for the GPU's copy engine, which a kernel takes as an argument
(feed.cuh)."""

from __future__ import annotations

import ctypes
import functools

import torch

from . import _check, _driver, enter

_SIZE, _ALIGNMENT = 128, 64
_NO_SWIZZLE, _SWIZZLE_128, _PROMOTE_256 = 0, 3, 3  # as cuda.h numbers them
_NUMBERS = {1: 0, 2: 1, 8: 4}  # unsigned ones by their bytes, the same
_ROW_BYTES = 128  # of a box: what the swizzle spans
_EIGHT = 8  # rows in which gates and what belongs to them take turns


def boxes(x: torch.Tensor, rows: int) -> bytes:
    """x [M, K] of one- or two-byte numbers as boxes of `rows` rows and 128 bytes of each, in the
    128-byte swizzle; what lies outside is read as zeros. Rows begin at whole 16 bytes."""
    size = x.element_size()
    shape, strides = (x.shape[1], x.shape[0]), (x.stride(0) * size,)
    return _encoded(x.data_ptr(), size, shape, strides, (_ROW_BYTES // size, rows), _SWIZZLE_128)


def head_boxes(x: torch.Tensor, heads: int, tokens: int) -> bytes:
    """x [tokens, heads, K] of two-byte numbers as boxes of so many tokens, so many heads of each,
    and 128 bytes of each head, in the same swizzle."""
    size = x.element_size()
    shape = (x.shape[2], x.shape[1], x.shape[0])
    strides = (x.stride(1) * size, x.stride(0) * size)
    box = (_ROW_BYTES // size, heads, tokens)
    return _encoded(x.data_ptr(), size, shape, strides, box, _SWIZZLE_128)


def gate_boxes(x: torch.Tensor, rows: int) -> bytes:
    """Bytes [E, N, K], N in whole sixteens, as boxes of `rows` rows of one matrix: eight of its
    first half, eight of its second one, and so on, by eights, 0, 0 and matrices after the byte."""
    matrices, height, width = x.shape
    shape = (width, _EIGHT, 2, height // 2 // _EIGHT, matrices)
    strides = (width, height // 2 * width, _EIGHT * width, height * width)
    box = (_ROW_BYTES, _EIGHT, 2, rows // 2 // _EIGHT, 1)
    return _encoded(x.data_ptr(), 1, shape, strides, box, _SWIZZLE_128)


def slab_boxes(x: torch.Tensor, size: int, slabs: int) -> bytes:
    """Slabs of `size` bytes [slabs, turns * size] as boxes of one turn of so many of them, one
    after the other; columns are counted in eight bytes."""
    shape, strides, word = (x.shape[1] // 8, x.shape[0]), (x.shape[1],), 8
    return _encoded(x.data_ptr(), word, shape, strides, (size // word, slabs), _NO_SWIZZLE)


@functools.lru_cache(maxsize=4096)
def _encoded(
    address: int,
    size: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> bytes:
    """Of numbers of so many bytes; strides are in bytes, of all dimensions but the first."""
    enter(torch.cuda.current_device())
    memory = ctypes.create_string_buffer(_SIZE + _ALIGNMENT)
    start = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    rank = len(shape)
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start), _NUMBERS[size], rank, ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*shape), (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank),
        0, swizzle, _PROMOTE_256, 0,
    )  # fmt: skip
    _check(code, "tensor map")
    return ctypes.string_at(start, _SIZE)
