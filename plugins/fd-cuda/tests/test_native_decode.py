"""The CUDA C++ decode kernels on the CPU: their sources, compiled as C++ over an emulated GPU
(emulated.h)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import emulation
import numpy as np
import pytest
import torch
from attention_steps import Step, gqa
from fastdeploy_core.contracts.device import DeviceOptions

from fastdeploy_testing.drivers import lookup
from fd_cuda.attention import native_gqa
from fd_cuda.attention.gqa import PagedAttention
from fd_cuda.attention.native_gqa import NativeShape
from fd_cuda.attention.plan import DecodeShape, StreamShape
from fd_cuda.attention.tuning import Gpu, Sizes
from fd_cuda.kernels import native

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernel itself"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


class Emulation(emulation.Emulation):
    header = "emulated_attention.h"


class Given(Sizes):
    """One shape for all."""

    shape: NativeShape | StreamShape

    def native(self, *args: Any) -> NativeShape | StreamShape:
        return self.shape


@pytest.fixture
def emulated(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels' module, with an emulated GPU behind it."""
    emulated = Emulation(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.setattr(native, "function", emulated.function)
    monkeypatch.setattr(native, "launch", emulated.launch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(native, "has_wgmma", lambda: False)  # prompts are not the subject


@pytest.fixture
def step_of(emulated: None) -> Callable[..., tuple[Step, Any]]:
    """A step and a driver that computes it with the given sizes."""
    device = lookup("device", "cpu")(DeviceOptions(tensor_library="torch", num_threads=1))

    def make(rows: list[tuple[int, int]], chosen: NativeShape | StreamShape, **spec: Any) -> Any:
        dtype, heads = spec.pop("dtype", "bfloat16"), spec.pop("heads", (8, 1))
        shape = gqa(dtype, *heads, 128, interleaved=spec.pop("interleaved", False))
        step = Step(device, shape, rows, block_size=16, **spec)
        driver, sizes = PagedAttention(shape, 16, device, None), Given(Gpu(4, True))
        sizes.shape = chosen
        driver.use(sizes)
        return step, driver

    return make


def clusters(cluster: int, units: int, target: int, warps: int = 4) -> NativeShape:
    return NativeShape(DecodeShape(64, 1, 8, target, 4, 1), cluster, units, 1, warps)


@pytest.mark.parametrize(
    "chosen",
    [
        clusters(2, 1, 4, 2),
        clusters(4, 2, 1),
        *(pytest.param(s, marks=pytest.mark.slow) for s in (clusters(1, 2, 1), clusters(1, 1, 6))),
    ],
)
def test_splits_and_clusters(step_of: Any, chosen: NativeShape) -> None:
    rows = [(1, 130), (1, 1), (1, 300), (1, 0)]
    step, driver = step_of(rows, chosen, rotary_dim=128)
    first = step.check(driver, step.batch(tokens_per_row=1))
    again, _ = step.run(driver, step.batch(tokens_per_row=1))
    assert np.array_equal(first, again, equal_nan=True)


# Blocks of many rows, of parts of one row, without any; shares that begin and end within rows.
@pytest.mark.parametrize(
    "chosen",
    [
        StreamShape(32, 2, 1, 3, 4, 5),
        StreamShape(64, 2, 2, 3, 2, 1),
        pytest.param(StreamShape(32, 8, 1, 3, 1, 14), marks=pytest.mark.slow),
        pytest.param(StreamShape(16, 2, 1, 4, 1, 40), marks=pytest.mark.slow),
    ],
)
def test_streams(step_of: Any, chosen: StreamShape) -> None:
    rows = [(1, 0), (1, 130), (1, 1), (1, 33), (1, 300), (1, 64), (1, 0)]
    step, driver = step_of(rows, chosen, rotary_dim=128, heads=(10, 2))
    first = step.check(driver, step.batch(tokens_per_row=1))
    again, _ = step.run(driver, step.batch(tokens_per_row=1))
    assert np.array_equal(first, again, equal_nan=True)


def test_a_block_for_every_row_and_head(step_of: Any) -> None:
    rows = [(1, 130), (1, 129), (1, 0), (1, 97)]
    step, driver = step_of(rows, StreamShape(32, 2, 1, 3, 2, 8), rotary_dim=128, heads=(6, 2))
    step.check(driver, step.batch(tokens_per_row=1))


@pytest.mark.parametrize("chosen", [clusters(2, 1, 2), StreamShape(32, 2, 1, 3, 3, 3)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_are_normed_before_they_are_rotated(
    step_of: Any, chosen: NativeShape | StreamShape, interleaved: bool
) -> None:
    """Two tokens a row, so that some threads of a warp hold no query and no key."""
    options = {"heads": (3, 1), "rotary_dim": 128, "has_norms": True, "interleaved": interleaved}
    step, driver = step_of([(2, 50), (2, 2), (2, 0)], chosen, **options)
    step.check(driver, step.batch(tokens_per_row=2))


COLUMNS = [
    (1, (10, 2), "float16", True),
    (2, (8, 1), "bfloat16", False),
    (2, (5, 1), "bfloat16", True),
    (4, (8, 1), "float16", False),
]


@pytest.mark.parametrize(("tokens", "heads", "dtype", "interleaved"), COLUMNS)
def test_columns(
    step_of: Any, tokens: int, heads: tuple[int, int], dtype: str, interleaved: bool
) -> None:
    """Tokens times heads of a group, in both dtypes and both ways to rotate."""
    rows = [(tokens, 100), (tokens, tokens), (tokens, 0)]
    options = {"dtype": dtype, "heads": heads, "interleaved": interleaved, "rotary_dim": 128}
    step, driver = step_of(rows, clusters(2, 1, 2), padding=tokens // 4, **options)
    step.check(driver, step.batch(tokens_per_row=tokens))


@pytest.mark.parametrize(("tokens", "heads", "dtype", "interleaved"), COLUMNS[1:])
def test_columns_of_streams(
    step_of: Any, tokens: int, heads: tuple[int, int], dtype: str, interleaved: bool
) -> None:
    rows = [(tokens, 100), (tokens, tokens), (tokens, 0)]
    options = {"dtype": dtype, "heads": heads, "interleaved": interleaved, "rotary_dim": 128}
    chosen = StreamShape(32, 4, 2, 3, 1, 3) if tokens == 4 else StreamShape(32, 2, 1, 3, 3, 3)
    step, driver = step_of(rows, chosen, padding=tokens // 4, **options)
    step.check(driver, step.batch(tokens_per_row=tokens))


@pytest.mark.parametrize("chosen", [clusters(1, 2, 2), StreamShape(32, 2, 1, 2, 1, 2)])
def test_without_rotation(step_of: Any, chosen: NativeShape | StreamShape) -> None:
    step, driver = step_of([(1, 90), (1, 33)], chosen)
    step.check(driver, step.batch(tokens_per_row=1))


@pytest.mark.parametrize("chosen", [clusters(1, 2, 2), StreamShape(32, 2, 1, 2, 1, 2)])
def test_half_a_rotation_takes_another_kernel(
    step_of: Any, chosen: NativeShape | StreamShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, driver = step_of([(1, 90), (1, 33)], chosen, rotary_dim=64)
    monkeypatch.setattr(native, "launch", None)
    step.check(driver, step.batch(tokens_per_row=1))


def test_many_columns_take_another_kernel() -> None:
    spec = gqa("bfloat16", 8, 1, 128)
    decode = native_gqa.NativeDecode(spec, 16)
    assert decode.columns(1) == 0, "there is no GPU"
