"""The CUDA C++ kernels of packed weights on the CPU."""

from __future__ import annotations

from pathlib import Path

import emulation
import pytest
import torch

from fd_cuda.kernels import native


class Emulation(emulation.Emulation):
    header = "emulated_quant.h"


def use_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's own, or emulated ones."""
    if not torch.cuda.is_available():
        emulated = Emulation(folder)
        monkeypatch.setattr(native, "function", emulated.function)
        monkeypatch.setattr(native, "launch", emulated.launch)
    elif not native.has_wgmma():
        pytest.skip("needs a Hopper GPU")
