"""The CUDA C++ kernels of packed weights on the CPU."""

from __future__ import annotations

import struct
from pathlib import Path

import emulation
import pytest
import torch

from fd_cuda.kernels import native
from fd_cuda.kernels.native import tensor_map


class Emulation(emulation.Emulation):
    header = "emulated_quant.h"


def _record(x: torch.Tensor, size: int, rows: int, row_bytes: int, matrix_rows: int = 0) -> bytes:
    """What emulated_feed.h takes for a tensor map: rows of numbers of `size` bytes, of a box so
    many rows and bytes."""
    stride = x.stride(-2) * x.element_size()
    height, inputs = x.numel() // x.shape[-1], x.shape[-1] * x.element_size() // size
    swizzles = int(size < 8)
    fields = (x.data_ptr(), stride, inputs, height, rows, size, row_bytes, swizzles, matrix_rows)
    return struct.pack("@Pqiiiiiii", *fields).ljust(128, b"\0")


def boxes(x: torch.Tensor, rows: int) -> bytes:
    return _record(x, x.element_size(), rows, 128)


def head_boxes(x: torch.Tensor, heads: int, tokens: int) -> bytes:
    fields = (x.data_ptr(), x.stride(0) * 2, x.shape[2], x.shape[0], tokens, 2, 128, 1)
    return struct.pack("@Pqiiiiiii", *fields, x.stride(1) * 2).ljust(128, b"\0")


def gate_boxes(x: torch.Tensor, rows: int) -> bytes:
    return _record(x, 1, rows, 128, x.shape[1])


def slab_boxes(x: torch.Tensor, size: int, slabs: int) -> bytes:
    return _record(x, 8, slabs, size)


def use_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's own, or emulated ones."""
    if not torch.cuda.is_available():
        emulated = Emulation(folder)
        monkeypatch.setattr(native, "function", emulated.function)
        monkeypatch.setattr(native, "launch", emulated.launch)
        for own in (boxes, gate_boxes, slab_boxes):
            monkeypatch.setattr(tensor_map, own.__name__, own)
    elif not native.has_wgmma():
        pytest.skip("needs a Hopper GPU")
