"""The CUDA C++ decode kernel on the CPU: its source, compiled as C++ over an emulated GPU (emulated.h)."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_steps import Step, gqa
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.plugins.drivers import lookup

from fd_cuda.attention import native_decode
from fd_cuda.attention.gqa import PagedAttention
from fd_cuda.attention.native_decode import NativeShape
from fd_cuda.attention.plan import DecodeShape
from fd_cuda.attention.tuning import Gpu, Sizes
from fd_cuda.kernels import native

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernel itself"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
HERE = Path(__file__).parent


class Arguments(ctypes.Structure):
    _fields_ = (
        ("pointer", ctypes.c_void_p * 15),
        ("scale", ctypes.c_float),
        ("integer", ctypes.c_int * 9),
    )


class Given(Sizes):
    """One shape for all."""

    shape: NativeShape

    def native(self, *args: Any) -> NativeShape:
        return self.shape


@pytest.fixture
def emulated(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels' module, with an emulated GPU behind it."""
    folder = tmp_path_factory.getbasetemp()

    def function(name: str, defines: dict[str, int]) -> ctypes.CDLL:
        source = Path(native.__file__).with_name(f"{name}.cu").read_text("utf-8")
        source = re.sub(r"// INSTRUCTIONS.*?// END OF INSTRUCTIONS", "", source, flags=re.S)
        source = re.sub(r"struct Word4 \{.*?\};", "", source, flags=re.S)
        source = source.replace("extern __shared__ __align__(16) float shared[];", "")
        source = source.replace('#include "common.cuh"', '#include "emulated.h"')
        options = [f"-D{key}={value}" for key, value in sorted(defines.items())]
        key = hashlib.sha256("\0".join([source, *options]).encode()).hexdigest()[:16]
        library = folder / f"{key}.so"
        if not library.exists():
            path = folder / f"{key}.cpp"
            path.write_text(source + '\n#include "emulated_run.h"\n', "utf-8")
            command = [
                "g++",
                "-std=c++20",
                "-O1",
                "-w",
                "-shared",
                "-fPIC",
                "-pthread",
                f"-I{HERE}",
            ]
            subprocess.run([*command, *options, path, "-o", library], check=True)
        return ctypes.CDLL(str(library))

    def launch(
        kernel: ctypes.CDLL,
        grid: tuple[int, int, int],
        threads: int,
        arguments: list[Any],
        *,
        shared: int,
        cluster: int,
    ) -> None:
        assert threads == 128 and grid[2] == cluster and shared <= 4 * 65536
        given, pointers = Arguments(), [x for x in arguments if x is None or hasattr(x, "data_ptr")]
        for index, x in enumerate(pointers):
            given.pointer[index] = None if x is None else x.data_ptr()
        given.scale = arguments[15]
        given.integer[:] = arguments[16:]
        kernel.run_grid(grid[0], grid[1], ctypes.byref(given))

    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.setattr(native, "function", function)
    monkeypatch.setattr(native, "launch", launch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.fixture
def step_of(emulated: None) -> Callable[..., tuple[Step, Any]]:
    """A step and a driver that computes it with the given sizes."""
    device = lookup("device", "cpu")(DeviceOptions(tensor_library="torch", num_threads=1))

    def make(
        rows: list[tuple[int, int]], cluster: int, units: int, target: int, **spec: Any
    ) -> Any:
        dtype, heads = spec.pop("dtype", "bfloat16"), spec.pop("heads", (8, 1))
        shape = gqa(dtype, *heads, 128, interleaved=spec.pop("interleaved", False))
        step = Step(device, shape, rows, block_size=16, **spec)
        driver, sizes = PagedAttention(shape, 16, device, None), Given(Gpu(4, True))
        sizes.shape = NativeShape(DecodeShape(64, 1, 8, target, 4, 1), cluster, units, 1)
        driver.use(sizes)
        return step, driver

    return make


@pytest.mark.parametrize(
    ("cluster", "units", "target"), [(1, 2, 1), (2, 1, 4), (4, 2, 1), (1, 1, 6)]
)
def test_splits_and_clusters(step_of: Any, cluster: int, units: int, target: int) -> None:
    rows = [(1, 130), (1, 1), (1, 300), (1, 0)]
    step, driver = step_of(rows, cluster, units, target, rotary_dim=128)
    first = step.check(driver, step.batch(tokens_per_row=1))
    again, _ = step.run(driver, step.batch(tokens_per_row=1))
    assert np.array_equal(first, again, equal_nan=True)


@pytest.mark.parametrize(
    ("tokens", "heads", "dtype", "interleaved"),
    [
        (1, (10, 2), "float16", True),
        (2, (8, 1), "bfloat16", False),
        (2, (5, 1), "bfloat16", True),
        (4, (8, 1), "float16", False),
    ],
)
def test_columns(
    step_of: Any, tokens: int, heads: tuple[int, int], dtype: str, interleaved: bool
) -> None:
    """Tokens times heads of a group, in both dtypes and both ways to rotate."""
    rows = [(tokens, 100), (tokens, tokens), (tokens, 0)]
    options = {"dtype": dtype, "heads": heads, "interleaved": interleaved, "rotary_dim": 128}
    step, driver = step_of(rows, 2, 1, 2, padding=tokens // 4, **options)
    step.check(driver, step.batch(tokens_per_row=tokens))


def test_without_rotation(step_of: Any) -> None:
    step, driver = step_of([(1, 90), (1, 33)], 1, 2, 2)
    step.check(driver, step.batch(tokens_per_row=1))


def test_many_columns_take_another_kernel() -> None:
    spec = gqa("bfloat16", 8, 1, 128)
    decode = native_decode.NativeDecode(spec, 16)
    assert decode.columns(1) == 0, "there is no GPU"
