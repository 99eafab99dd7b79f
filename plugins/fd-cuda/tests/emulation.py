"""Kernels of kernels/native as C++ over an emulated GPU: compiled by g++, one library per specialization."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from fd_cuda.kernels import native

HERE = Path(__file__).parent
_COMPILE = ("g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-I{HERE}")


class Arguments(ctypes.Structure):
    """See emulated_run.h."""

    _fields_ = (("p", ctypes.c_void_p * 16), ("f", ctypes.c_float * 4), ("n", ctypes.c_int * 12))


def build(folder: Path, name: str, defines: dict[str, int], call: str, header: str) -> ctypes.CDLL:
    """The kernel `name`; `call` is how it is called with the members of Arguments, `header` stands in for
    common.cuh."""
    folder_of_kernels = Path(native.__file__).parent
    source = (folder_of_kernels / f"{name}.cu").read_text("utf-8")
    for shared in ("few_rows", "attention"):
        text = (folder_of_kernels / f"{shared}.cuh").read_text("utf-8")
        source = source.replace(f'#include "{shared}.cuh"', text)
    source = re.sub(r"// INSTRUCTIONS.*?// END OF INSTRUCTIONS", "", source, flags=re.S)
    source = re.sub(r"struct Word4 \{.*?\};", "", source, flags=re.S)
    source = source.replace("extern __shared__ __align__(16) float shared[];", "")
    source = source.replace('#include "common.cuh"', f'#include "{header}"')
    source += '\n#include "emulated_run.h"\n'
    options = [f"-D{key}={value}" for key, value in sorted({"CLUSTER": 1, **defines}.items())]
    options.append(f"-DCALL={call}")
    key = hashlib.sha256("\0".join([source, *options]).encode()).hexdigest()[:16]
    library = folder / f"{key}.so"
    if not library.exists():
        path = folder / f"{key}.cpp"
        path.write_text(source, "utf-8")
        subprocess.run([*_COMPILE, *options, path, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def run(kernel: ctypes.CDLL, grid: tuple[int, ...], arguments: Sequence[object]) -> None:
    """Every block of the grid. Tensors and None are `p` in their order, floats `f`, the rest `n`."""
    given, counts = Arguments(), {"p": 0, "f": 0, "n": 0}
    for argument in arguments:
        value: object = getattr(argument, "value", argument)
        kind = "p"
        if isinstance(argument, torch.Tensor):
            value = argument.data_ptr()
        elif argument is not None:
            kind = "f" if isinstance(value, float) else "n"
        getattr(given, kind)[counts[kind]] = value
        counts[kind] += 1
    kernel.run_grid(grid[0], grid[1], ctypes.byref(given))
