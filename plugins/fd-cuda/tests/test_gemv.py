"""kernels/native/gemv.cu on the emulated GPU, against float64."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import emulation
import pytest
import torch

from fd_cuda.kernels import linear, native
from fd_cuda.kernels.plans import Plan

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_native.py runs it on the GPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


class Emulation(emulation.Emulation):
    header = "emulated_rows.h"


@pytest.fixture(autouse=True)
def emulated(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    emulated = Emulation(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(native, "function", emulated.function)
    monkeypatch.setattr(native, "launch", emulated.launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    linear._prepared.cache_clear()
    yield
    linear._prepared.cache_clear()


@pytest.mark.parametrize(
    ("epilogue", "has_norm", "rows", "width", "depth", "warps", "dtype"),
    [
        ("plain", True, 3, 40, 256, 2, torch.bfloat16),  # two rounds a line of memory
        ("add", False, 9, 24, 192, 2, torch.float16),  # an odd number of rounds
        ("gated", True, 1, 48, 1536, 4, torch.bfloat16),  # groups, the next ahead of the products
        ("add", False, 2, 20, 1664, 4, torch.bfloat16),  # more rounds than are held ahead
    ],
)
def test_products(
    epilogue: str,
    has_norm: bool,
    rows: int,
    width: int,
    depth: int,
    warps: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, depth + 8).to(dtype)[:, :depth]
    gain = torch.randn(depth).to(dtype) if has_norm else None
    weight = (torch.randn(width, depth) * 0.1).to(dtype)
    residual = torch.randn(rows, width).to(dtype) if epilogue == "add" else None
    bias = torch.randn(width).to(dtype) if epilogue != "add" else None
    wanted = x.double()
    if gain is not None:
        scale = torch.rsqrt((wanted * wanted).mean(-1, keepdim=True) + 1e-5)
        wanted = wanted * scale * gain.double()
    wanted = wanted @ weight.double().T
    if bias is not None:
        wanted = wanted + bias.double()
    if epilogue == "gated":
        gate, up = wanted.chunk(2, -1)
        wanted = torch.nn.functional.silu(gate) * up
    if residual is not None:
        wanted = wanted + residual.double()
    plan = Plan("gemv", warps=warps)
    y = torch.full((rows, wanted.shape[1]), float("nan"), dtype=dtype)
    y = y if residual is None else residual
    linear._launch(plan, epilogue, x, gain, 1e-5, weight, bias, residual, y)
    error = (y.double() - wanted).norm() / wanted.norm()
    assert error < (6e-3 if dtype == torch.bfloat16 else 1e-3)
