"""The kernels of a block of experts for few tokens: the emulated GPU on a CPU, the real one where there is."""

from __future__ import annotations

import ctypes
import shutil
from typing import Any

import emulation
import pytest
import torch
from fastdeploy_core.contracts.moe import RoutingSpec
from moe_reference import reference

from fd_cuda.kernels import few_experts, native

CALLS = {
    "route": (
        "route((u16*)p[0],n[0],(u16*)p[1],(float*)p[2],(float*)p[3],(float*)p[4],(int*)p[5],"
        "(int*)p[6],(float*)p[7],f[0],f[1],f[2])"
    ),
    "experts_up": ("experts_up((u16*)p[0],n[0],(u16*)p[1],(u16*)p[2],(int*)p[3],(u16*)p[4],f[0])"),
    "experts_down": (
        "experts_down((u16*)p[0],(u16*)p[1],(int*)p[2],(float*)p[3],(u16*)p[4],(u16*)p[5],n[0])"
    ),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def emulated(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels' module, with an emulated GPU behind it where there is no other."""
    if torch.cuda.is_available():
        return
    if shutil.which("g++") is None:
        pytest.skip("needs a GPU or g++")
    folder = tmp_path_factory.getbasetemp()

    def function(name: str, defines: dict[str, int]) -> ctypes.CDLL:
        defines = {**defines, "FIBERS": 32 * defines["WARPS"]}
        return emulation.build(folder, name, defines, CALLS[name], "emulated_rows.h")

    def launch(kernel: Any, grid: tuple[int, ...], threads: int, arguments: list[Any]) -> None:
        emulation.run(kernel, grid, arguments)

    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.setattr(native, "function", function)
    monkeypatch.setattr(native, "launch", launch)
    for cached in (few_experts._kernels, few_experts._serves, few_experts._arrived):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("tokens", "experts", "shared", "scoring", "has_bias", "dtype"),
    [
        (1, 12, 2, "softmax", True, torch.bfloat16),
        (3, 40, 0, "sigmoid", False, torch.float16),
        (2, 33, 1, "softmax", False, torch.bfloat16),
    ],
)
def test_a_block_is_the_sum_of_its_experts(
    tokens: int, experts: int, shared: int, scoring: Any, has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    hidden, width = 256, 96
    spec = RoutingSpec(experts, 3, scoring, renormalize=tokens != 3, scaling_factor=1.5)

    def noise(*shape: int, size: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape) * size).to(dtype)

    x, gain = noise(tokens, hidden + 8)[:, :hidden], noise(hidden)
    router = torch.randn(experts, hidden) * 0.2
    bias = torch.randn(experts) * 0.1 if has_bias else None
    gate_up = noise(experts + shared, 2 * width, hidden, size=0.1)
    down = noise(experts + shared, hidden, width, size=0.1)
    wanted = reference(x, gain, router, bias, spec, gate_up, down)
    on_device = [
        None if t is None else t.to(DEVICE) for t in (x, gain, router, bias, gate_up, down)
    ]
    x, gain, router, bias, gate_up, down = on_device
    for _ in range(2):  # the counters are as they were
        got = few_experts.compute(x.clone(), gain, 1e-5, router, bias, spec, gate_up, down)
        error = (got.double().cpu() - wanted).norm() / wanted.norm()
        assert error < TOLERANCE[dtype], error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_shapes_that_it_does_not_serve() -> None:
    spec = RoutingSpec(8, 2)
    x = torch.zeros(1, 256, dtype=torch.bfloat16, device=DEVICE)
    router = torch.zeros(8, 256, device=DEVICE)
    gate_up = torch.zeros(8, 64, 256, dtype=torch.bfloat16, device=DEVICE)
    down = torch.zeros(8, 256, 32, dtype=torch.bfloat16, device=DEVICE)
    assert few_experts.can_compute(x, router, spec, gate_up, down)
    many = x.expand(few_experts.MOST_TOKENS + 1, -1).contiguous()
    assert not few_experts.can_compute(many, router, spec, gate_up, down)
    grouped = RoutingSpec(8, 2, num_groups=2, top_k_groups=1)
    assert not few_experts.can_compute(x, router, grouped, gate_up, down)
