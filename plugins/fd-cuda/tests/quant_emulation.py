"""The CUDA C++ kernels of packed weights on the CPU: their sources, compiled as C++ over an emulated GPU."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import COMPILE

from fd_cuda.kernels import native

FOLDER = Path(native.__file__).parent


def use_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's own, or emulated ones."""
    if not torch.cuda.is_available():
        emulation = Emulation(folder)
        monkeypatch.setattr(native, "function", emulation.function)
        monkeypatch.setattr(native, "launch", emulation.launch)
    elif not native.has_wgmma():
        pytest.skip("needs a Hopper GPU")


class Emulation:
    """`function` and `launch` in the place of those of fd_cuda.kernels.native."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def function(self, name: str, defines: dict[str, int]) -> ctypes.CDLL:
        source = (FOLDER / f"{name}.cu").read_text("utf-8")
        source = source.replace('#include "common.cuh"', '#include "emulated_quant.h"')
        for header in ("quant.cuh", "trellis.cuh", "wide.cuh", "rows.cuh", "copies.cuh"):
            source = source.replace(f'#include "{header}"', (FOLDER / header).read_text("utf-8"))
        source = re.sub(r"// INSTRUCTIONS.*?// END OF INSTRUCTIONS", "", source, flags=re.S)
        source = re.sub(r"extern __shared__ \S+ float row\[\];", "float* row = shared;", source)
        source = re.sub(r"extern __shared__ .*?;", "", source)
        threads = defines.get("THREADS", 32 * defines.get("WARPS", 4 * defines.get("GROUPS", 1)))
        sizes = {**defines, "KERNEL": name, "FIBERS": threads}
        options = [f"-D{key}={value}" for key, value in sorted(sizes.items())]
        key = hashlib.sha256("\0".join([source, *options]).encode()).hexdigest()[:16]
        library = self._folder / f"{key}.so"
        if not library.exists():
            path = self._folder / f"{key}.cpp"
            path.write_text(source + '\n#include "emulated_grid.h"\n', "utf-8")
            subprocess.run([*COMPILE, *options, path, "-o", library], check=True)
        return ctypes.CDLL(str(library))

    def launch(
        self,
        kernel: ctypes.CDLL,
        grid: tuple[int, int, int],
        threads: int,
        arguments: list[Any],
        *,
        shared: int = 0,
        cluster: int = 1,
    ) -> None:
        assert cluster == 1 and grid[2] == 1 and shared <= 4 * 65536
        values = [_held(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values)
        )
        kernel.run_grid(grid[0], grid[1], pointers)


def _held(argument: Any) -> Any:
    """Memory with what a launch passes."""
    types = {"P": ctypes.c_void_p, "f": ctypes.c_float, "i": ctypes.c_int, "l": ctypes.c_longlong}
    return types[native._code(argument)](native._value(argument))
