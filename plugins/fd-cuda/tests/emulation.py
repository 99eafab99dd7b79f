"""Kernels of kernels/native as C++ over an emulated GPU: compiled by g++, one library per
specialization."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from pathlib import Path
from typing import Any, ClassVar

from fd_cuda.kernels import native

HERE = Path(__file__).parent
FOLDER = Path(native.__file__).parent
LIBRARY = HERE / "emulated_library.h"
_COMPILE = ("g++", "-std=c++20", "-O1", "-w", "-fPIC", "-pthread")
_TYPES = {"P": ctypes.c_void_p, "f": ctypes.c_float, "i": ctypes.c_int, "l": ctypes.c_longlong}


class Emulation:
    """`function` and `launch` in the place of those of fd_cuda.kernels.native."""

    header: ClassVar[str]  # what stands in for common.cuh

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def function(self, name: str, defines: dict[str, int]) -> ctypes.CDLL:
        source = self._source(f"{name}.cu")
        source = re.sub(r"// INSTRUCTIONS.*?// END OF INSTRUCTIONS", "", source, flags=re.S)
        source = re.sub(r"struct Word4 \{.*?\};", "", source, flags=re.S)
        source = re.sub(r"extern __shared__ \S+ float row\[\];", "float* row = shared;", source)
        source = re.sub(r"extern __shared__ .*?;", "", source)
        source += '\n#include "emulated_grid.h"\n'
        threads = 32 * defines.get("WARPS", 4 * defines.get("GROUPS", 1))
        sizes = {
            "CLUSTER": defines.get("SPLIT", 1), **defines, "KERNEL": name,
            "FIBERS": defines.get("THREADS", threads)
        }  # fmt: skip
        options = [f"-D{key}={value}" for key, value in sorted(sizes.items())]
        key = hashlib.sha256("\0".join([source, *options]).encode()).hexdigest()[:16]
        library = self._folder / f"{key}.so"
        if not library.exists():
            path = self._folder / f"{key}.cpp"
            path.write_text(source, "utf-8")
            own = ["-shared", "-include", self._library(), f"-I{HERE}", *options, path]
            subprocess.run([*_COMPILE, *own, "-o", library], check=True)
        return ctypes.CDLL(str(library))

    def _library(self) -> Path:
        """The standard library's headers, beside which their compiled form lies."""
        header = self._folder / LIBRARY.name
        if not header.exists():
            header.write_text(LIBRARY.read_text("utf-8"), "utf-8")
            compiled = f"{header}.gch"
            subprocess.run([*_COMPILE, "-x", "c++-header", header, "-o", compiled], check=True)
        return header

    def _source(self, name: str) -> str:
        """The file with what it includes in place."""
        text = (FOLDER / name).read_text("utf-8")
        text = text.replace('#include "common.cuh"', f'#include "{self.header}"')
        return re.sub(r'#include "(\w+\.cuh)"', lambda match: self._source(match[1]), text)

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
        """Every block of the grid."""
        sizes = [ctypes.c_int.in_dll(kernel, name).value for name in ("num_threads", "num_blocks")]
        assert [threads, cluster] == sizes and grid[2] == cluster and shared <= 4 * 65536
        values = [_held(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values)
        )
        kernel.run_grid(grid[0], grid[1], pointers)


def _held(argument: Any) -> Any:
    """Memory with what a launch passes."""
    if isinstance(argument, bytes):
        return ctypes.create_string_buffer(argument, len(argument))
    return _TYPES[native._code(argument)](native._value(argument))
