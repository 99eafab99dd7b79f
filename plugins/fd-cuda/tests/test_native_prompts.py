"""prompt_attention.cu against float64: emulated, the copy engine included, or on the GPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import emulation
import numpy as np
import pytest
import quant_emulation
import torch
from attention_steps import Step, gqa
from fastdeploy_core.contracts.device import DeviceOptions

from fastdeploy_testing.drivers import lookup
from fd_cuda.attention import gqa as drivers
from fd_cuda.attention import native_gqa
from fd_cuda.attention.gqa import PagedAttention
from fd_cuda.attention.native_gqa import NativePrompts
from fd_cuda.attention.tuning import Gpu, Sizes
from fd_cuda.kernels import native
from fd_cuda.kernels.native import tensor_map

HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not HAS_GPU and shutil.which("g++") is None, reason="needs g++")
# (tokens fed, tokens in all) of each row.
Rows = list[tuple[int, int]]


class Emulation(emulation.Emulation):
    header = "emulated_prompts.h"


@pytest.fixture(autouse=True)
def kernels(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's own, or an emulated one's; the Triton kernel may not take their place."""
    monkeypatch.setattr(drivers, "prefill_attention", None)
    if not HAS_GPU:
        emulated = Emulation(tmp_path_factory.getbasetemp())
        monkeypatch.setattr(native, "has_wgmma", lambda: True)
        monkeypatch.setattr(native, "function", emulated.function)
        monkeypatch.setattr(native, "launch", emulated.launch)
        for name in ("boxes", "head_boxes"):
            monkeypatch.setattr(tensor_map, name, getattr(quant_emulation, name))
    elif not native.has_wgmma():
        pytest.skip("needs a Hopper GPU")


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are served, too, so that steps can be short."""
    monkeypatch.setattr(native_gqa, "_LEAST_WINDOW", 1)


def made(rows: Rows, heads: tuple[int, int], **options: Any) -> tuple[Step, PagedAttention]:
    """A step and the driver that computes it."""
    name, library = ("cuda" if HAS_GPU else "cpu"), {"tensor_library": "torch"}
    device = lookup("device", name)(DeviceOptions(**library, num_threads=1))
    dtype, size = options.pop("dtype", "bfloat16"), options.pop("block_size", 64)
    spec = gqa(dtype, *heads, options.pop("width", 128))
    spec = replace(spec, window=options.pop("window", 0), sinks=options.pop("sinks", False))
    spec = replace(spec, rotary_interleaved=options.pop("interleaved", False))
    driver = PagedAttention(spec, size, device, None)
    if not HAS_GPU:
        driver.use(Sizes(Gpu(3, True)))
    return Step(device, spec, rows, block_size=size, **options), driver


# Rows that begin and end within tiles of keys, of blocks and of tokens; groups that fill a tile's
# rows and that do not; rows after a cached part, whole tiles or not.
SMALL: list[tuple[Rows, tuple[int, int], int, str]] = [
    ([(150, 150), (20, 220), (9, 9)], (8, 1), 64, "bfloat16"),
    ([(33, 161), (130, 130)], (10, 2), 16, "float16"),
    ([(12, 140), (40, 40)], (2, 2), 128, "bfloat16"),
]
LARGE: list[Rows] = [
    [(640, 640)] * 3,
    [(4096, 4096)],
    [(1000, 4000), (777, 3001), (64, 64)],
    [(128, 128)] * 32,
    [(2000, 2001), (9, 70), (1, 100), (257, 257)],
]
# (heads, block size, dtype, width, window, sinks)
SHAPES: list[tuple[tuple[int, int], int, str, int, int, bool]] = [
    ((16, 2), 64, "bfloat16", 128, 0, False),
    ((16, 2), 16, "float16", 128, 0, False),
    ((20, 4), 64, "bfloat16", 128, 1024, False),
    ((16, 8), 32, "bfloat16", 128, 0, True),
    ((4, 4), 128, "float16", 128, 0, False),
    ((64, 8), 64, "bfloat16", 128, 0, False),
    ((32, 8), 64, "bfloat16", 64, 0, True),
    ((32, 8), 16, "bfloat16", 64, 128, True),
    ((10, 2), 32, "float16", 64, 1000, False),
    ((9, 3), 128, "float16", 64, 0, False),
    ((4, 4), 64, "bfloat16", 64, 77, True),
    ((64, 8), 64, "bfloat16", 64, 0, True),
    ((14, 2), 64, "float16", 64, 0, False),
]


@pytest.mark.parametrize(
    ("case", "is_exact"),
    [(SMALL[0], True), (SMALL[0], False), (SMALL[1], True), (SMALL[2], False)],
    ids=str,
)
def test_prompts(case: Any, is_exact: bool) -> None:
    """Of rows that the host knows, and of those that only the device does."""
    rows, heads, size, dtype = case
    step, driver = made(rows, heads, block_size=size, dtype=dtype, rotary_dim=128)
    step.check(driver, step.batch(is_exact=is_exact))


@pytest.mark.parametrize("is_exact", [True, False])
def test_heads_in_passes(is_exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key-value head after the other, of more items than there are blocks, and of fewer."""
    monkeypatch.setattr(native_gqa, "_HELD_BYTES", 1)
    for rows in ([(40, 40)], [(70, 75), (9, 9), (60, 60), (100, 140)]):
        step, driver = made(rows, (8, 4), rotary_dim=128)
        assert driver._native_prompts._heads_together(40) == 1
        step.check(driver, step.batch(is_exact=is_exact))


# (heads, numbers that are rotated, interleaved, norms, dtype). A thread's queries are of one token
# or of two.
ROTATIONS: list[tuple[tuple[int, int], int, bool, bool, str]] = [
    ((4, 1), 128, True, True, "float16"),
    ((5, 1), 64, False, True, "float16"),
    ((4, 2), 32, True, False, "bfloat16"),
    ((3, 1), 128, False, False, "bfloat16"),
    ((2, 1), 0, False, True, "float16"),
]


@pytest.mark.parametrize("case", ROTATIONS, ids=str)
def test_norms_and_rotation(case: Any) -> None:
    """Of queries, at positions that are not their indices; items follow each other."""
    heads, rotary_dim, interleaved, has_norms, dtype = case
    options: dict[str, Any] = {"rotary_dim": rotary_dim, "has_norms": has_norms, "offset": 5}
    rows = [(150, 190), (9, 9), (70, 70)]
    step, driver = made(rows, heads, dtype=dtype, interleaved=interleaved, **options)
    assert driver._native_prompts.can_rotate(step.q, step.batch(), step.rotary, step.norms)
    step.check(driver, step.batch())


def test_rotations_that_it_does_not_serve() -> None:
    """Are left to the kernel before it."""
    options: dict[str, Any] = {"has_norms": True, "dtype": "float16"}
    for heads, width, rotary_dim in (((4, 1), 128, 24), ((2, 2), 128, 128), ((2, 1), 64, 64)):
        step, driver = made([(40, 40)], heads, width=width, rotary_dim=rotary_dim, **options)
        prompts, batch = driver._native_prompts, step.batch()
        assert prompts.can_run(step.q, batch)
        assert not prompts.can_rotate(step.q, batch, step.rotary, step.norms)
        step.check(driver, batch)


# (rows, heads, width, window, sinks, block size, dtype). Windows that end within a tile of keys and
# at its begin, shorter and longer than it; in the step's own keys and in the cache, where all that
# lies before them is NaN.
OTHERS: list[tuple[Rows, tuple[int, int], int, int, bool, int, str]] = [
    ([(150, 150), (20, 420), (9, 9)], (4, 1), 64, 128, True, 64, "bfloat16"),
    ([(33, 161), (140, 150)], (5, 1), 64, 40, False, 16, "float16"),
    ([(12, 300), (140, 140)], (6, 2), 64, 0, True, 128, "bfloat16"),
    ([(30, 300), (140, 150)], (4, 2), 128, 129, True, 32, "bfloat16"),
]


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_narrow_heads_windows_and_sinks(case: Any) -> None:
    rows, heads, width, window, sinks, size, dtype = case
    options: dict[str, Any] = {"width": width, "window": window, "sinks": sinks}
    step, driver = made(rows, heads, block_size=size, dtype=dtype, **options)
    step.check(driver, step.batch())


@pytest.mark.usefixtures("short_windows")
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_long_prompts(shape: tuple[tuple[int, int], int, str, int, int, bool]) -> None:
    heads, size, dtype, width, window, sinks = shape
    options: dict[str, Any] = {"width": width, "window": window, "sinks": sinks}
    for rows in LARGE:
        step, driver = made(rows, heads, block_size=size, dtype=dtype, **options)
        out, _ = step.run(driver, step.batch())
        for row, (fed, _) in enumerate(rows):
            begin = step.starts[row]
            got = torch.from_numpy(out[begin : begin + fed]).cuda().double()
            meant = expected(step, row)
            error = float((got - meant).norm() / meant.norm())
            assert error < (1e-3 if dtype == "float16" else 6e-3), f"row {row} of {rows}: {error}"


def expected(step: Step, row: int) -> torch.Tensor:
    """In float64 on the GPU, without rotation, kv head after kv head."""
    (fed, length), spec, begin = step.rows[row], step.spec, step.starts[row]
    slots = [step.slot(row, token) for token in range(length - fed)]
    group, heads = spec.num_heads // spec.num_kv_heads, []
    for head in range(spec.num_kv_heads):
        q = step.q[begin : begin + fed, head * group : (head + 1) * group].cuda().double()
        k, v = (
            torch.cat((old[slots, head].nan_to_num(), own[begin : begin + fed, head]))
            .cuda()
            .double()
            for old, own in ((step.old_k, step.k), (step.old_v, step.v))
        )
        scores = q.transpose(0, 1) @ k.T * spec.scale
        keys = torch.arange(length, device="cuda")
        ahead = keys - keys[length - fed :, None]
        hidden = ahead > 0 if not spec.window else (ahead > 0) | (ahead <= -spec.window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if step.sinks is not None:
            sinks = step.sinks[head * group : (head + 1) * group].cuda().double()
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, fed, 1)), -1)
        heads.append((scores.softmax(-1)[..., :length] @ v).transpose(0, 1))
    return torch.cat(heads, 1).reshape(fed, -1)


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize(("width", "window"), [(128, 0), (64, 100)])
def test_other_rows_do_not_matter(width: int, window: int) -> None:
    """Not even where what follows a row is not finite."""
    step, driver = made([(70, 200), (140, 140)], (5, 1), width=width, window=window)
    alone, _ = step.run(driver, step.batch())
    step.qkv[70:] = float("nan")
    beside, _ = step.run(driver, step.batch())
    assert np.array_equal(alone[:70], beside[:70])


@pytest.mark.parametrize("width", [64, 128])
def test_products_that_rise(width: int) -> None:
    """What was summed up fades where a later turn has products far above those of the first."""
    step, driver = made([(20, 300), (150, 150)], (5, 1), width=width)
    step.q *= 16
    step.check(driver, step.batch())


def test_what_it_does_not_serve() -> None:
    spec = gqa("bfloat16", 8, 1, 128)
    for served in (
        spec,
        replace(spec, window=1024, sinks=True, offsets=True),
        gqa("bfloat16", 64, 8, 64),
    ):
        assert NativePrompts(served, 64).rows
    for other, size in ((spec, 48), (spec, 1), (gqa("float32", 8, 1, 128), 64)):
        assert not NativePrompts(other, size).rows
    for other in (
        gqa("bfloat16", 4, 1, 96),
        gqa("bfloat16", 128, 1, 128),
        replace(gqa("bfloat16", 4, 1, 64), v_head_dim=128),
        replace(spec, window=1023),
        replace(spec, chunk=128),
        replace(spec, softcap=30.0),
    ):
        assert not NativePrompts(other, 64).rows
