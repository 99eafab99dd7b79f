"""Products of few rows by every kernel that can compute them, against float64; GPU only."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from fd_cuda.kernels import linear
from fd_cuda.kernels.plans import LIBRARY, Plan, Product, fits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

ROWS = (1, 3, 8, 9, 16, 17, 64, 65, 130, 256)
SHAPES = ((96, 64), (392, 1024), (264, 2560))
PLANS = (
    Plan("gemm", 8, 64, 32, 4, 2),
    Plan("gemm", 8, 64, 64, 5, 8),
    Plan("gemm", 8, 128, 64, 6, 4),
    Plan("gemm", 8, 128, 128, 4, 1),
    *(Plan("gemv", warps=warps) for warps in (2, 8, 16)),
)
TOLERANCE = {"bfloat16": 6e-3, "float16": 8e-4}


def reference(
    epilogue: str,
    x: torch.Tensor,
    norm: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    wide = x.double()
    if norm is not None:
        wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * norm.double()
    y = wide @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if epilogue == "gated":
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


def plans(product: Product, rows: int) -> list[Plan]:
    """Those of PLANS that can do it; K decides what is compiled, so few warps are for small K
    alone."""
    return [
        plan
        for plan in PLANS
        if fits(plan, product, rows)
        and not (plan.kind == "gemv" and plan.warps < 8 and product.depth % 256 == 0)
    ]


def side_by_side(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results in order; kernels are compiled on all processors."""

    def one(call: Callable[[], Any]) -> Any:
        with torch.inference_mode():
            return call()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, calls))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("epilogue", ["plain", "add", "gated"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_every_plan_is_right(
    dtype: str, shape: tuple[int, int], epilogue: str, has_norm: bool
) -> None:
    if epilogue == "add" and has_norm:
        pytest.skip("nothing asks for it")
    torch.manual_seed(0)
    kind, (width, depth) = getattr(torch, dtype), shape
    product = Product(epilogue, has_norm, width, depth, dtype)
    weight = (torch.randn(width, depth, device="cuda") / depth**0.5).to(kind)
    norm = (torch.rand(depth, device="cuda") + 0.5).to(kind) if has_norm else None
    calls, expectations = [], []
    for rows in ROWS:
        x = torch.randn(rows, depth + 8, device="cuda").to(kind)[:, :depth]
        has_bias = rows % 2 == 1
        bias = torch.randn(width, device="cuda").to(kind) if has_bias else None
        residual = None
        if epilogue == "add":
            residual = torch.randn(rows, width, device="cuda").to(kind)
        expected = reference(epilogue, x, norm, weight, bias, residual)
        for plan in (LIBRARY, *plans(product, rows)):
            own = None if residual is None else residual.clone()
            arguments = (plan, epilogue, x, norm, 1e-5, weight, bias, own)
            calls.append(partial(linear.compute, *arguments))
            expectations.append((plan, rows, expected))
    for got, (plan, rows, expected) in zip(side_by_side(calls), expectations, strict=True):
        error = (got.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype], f"{plan} with {rows} rows is off by {float(error):.2g}"
        assert got.shape == expected.shape


@pytest.mark.parametrize("epilogue", ["plain", "gated"])
def test_a_row_does_not_depend_on_the_others(epilogue: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 1024, device="cuda").bfloat16()
    norm = (torch.rand(1024, device="cuda") + 0.5).bfloat16()
    weight = (torch.randn(512, 1024, device="cuda") / 32).bfloat16()
    for plan, most in (
        (Plan("gemv", warps=8), 16),
        (Plan("gemm", 8, 64, 64, 4, 4), 256),
        (Plan("gemm", 8, 128, 128, 4, 1), 256),
    ):
        crowd = linear.compute(plan, epilogue, x[:most], norm, 1e-5, weight, None, None)
        for rows in (1, 5, 9):
            alone = linear.compute(plan, epilogue, x[:rows], norm, 1e-5, weight, None, None)
            assert torch.equal(crowd[:rows], alone), f"{plan}, {rows} of {most} rows"


def test_replay_of_a_graph_equals_the_eager_run() -> None:
    torch.manual_seed(0)
    weight = (torch.randn(1024, 1024, device="cuda") / 32).bfloat16()
    norm = torch.ones(1024, device="cuda").bfloat16()
    x = torch.randn(8, 1024, device="cuda").bfloat16()
    residual = torch.zeros(8, 1024, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        y = x
        for _ in range(12):
            y = linear.norm_linear(y, norm, 1e-5, weight, None)
            y = linear.linear_add(y, weight, None, residual)
        return y

    expected = chain().clone()
    residual.zero_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        residual.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)


def test_any_number_of_rows_takes_a_vocabulary_s_kernels() -> None:
    """Rows are padded to those of captured steps, and what is after them is left out."""
    torch.manual_seed(0)
    weight, bias = torch.randn(70000, 64, device="cuda").bfloat16(), torch.randn(70000).cuda()
    for rows in (0, 1, 2, 3, 9, 129, 147, 256, 300):
        x = torch.randn(rows, 64, device="cuda").bfloat16()
        y = linear.linear(x, weight, bias.bfloat16())
        expected = reference("plain", x, None, weight, bias.bfloat16(), None)
        assert y.shape == (rows, 70000) and y.is_contiguous()
        assert torch.allclose(y.double(), expected, rtol=1e-2, atol=0.2)


@pytest.mark.parametrize("width", [50, 5000, 103424])
def test_kept_logits_equal_the_references(width: int) -> None:
    from fastdeploy_core.reference.ops import sampling as ops_sampling

    from fd_cuda.kernels import filtering

    torch.manual_seed(0)
    for trial, spread in enumerate((1.0, 3.0, 0.1, 8.0)):
        x = torch.randn(6, width, device="cuda") * spread
        if trial == 1:
            x = x.round()  # many equals
        if trial == 2:
            x[:, ::3] = float("-inf")
        if trial == 3:
            x[0], x[1, 1:] = 1.5, -1e9
        k = torch.tensor([0, 1, 5, min(width, 3000), 0, width], device="cuda")
        p = torch.tensor([0.9, 1.0, 0.5, 0.99, 0.1, 1.0], device="cuda")
        least = torch.tensor([0.0, 0.0, 0.05, 0.0, 0.2, 0.01], device="cuda")
        expected = ops_sampling.filter_logits(x.clone(), k, p, least) > float("-inf")
        for rows in (6, 1):
            got = filtering.filter_logits(x[:rows].clone(), k[:rows], p[:rows], least[:rows])
            kept = got > float("-inf")
            assert torch.equal(got[kept], x[:rows][kept]), "a kept logit was changed"
            # Sums in another order may move the last token of a large set by one.
            moved = (kept != expected[:rows]).sum(-1)
            allowed = (expected[:rows].sum(-1) // 2000).clamp(max=2)
            assert (moved <= allowed).all(), (trial, moved.tolist(), expected.sum(-1).tolist())
