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


def boxes(x: torch.Tensor, rows: int) -> bytes:
    """What emulated_feed.h takes for a tensor map."""
    size = x.element_size()
    record = struct.pack(
        "@Pqiiii", x.data_ptr(), x.stride(0) * size, x.shape[1], x.shape[0], rows, size
    )
    return record.ljust(128, b"\0")


def use_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's own, or emulated ones."""
    if not torch.cuda.is_available():
        emulated = Emulation(folder)
        monkeypatch.setattr(native, "function", emulated.function)
        monkeypatch.setattr(native, "launch", emulated.launch)
        monkeypatch.setattr(tensor_map, "boxes", boxes)
    elif not native.has_wgmma():
        pytest.skip("needs a Hopper GPU")
