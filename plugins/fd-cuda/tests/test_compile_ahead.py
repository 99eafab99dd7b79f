"""Which kernels compute products on an H200, and that those which other numbers of rows will need
are compiled when a product is first met."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fd_cuda.kernels import linear, native, plans
from fd_cuda.kernels.plans import LIBRARY, MOST_SHARED, ROWS, Plan, Product, choose, shared_bytes

Specialization = tuple[str, tuple[tuple[str, int], ...]]


PROCESSORS = 132


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[Specialization]]]:
    """What is compiled ahead, and what launches ask for."""
    seen: dict[str, set[Specialization]] = {"ahead": set(), "launched": set()}

    def note(kind: str, name: str, defines: dict[str, int]) -> Any:
        seen[kind].add((name, tuple(sorted(defines.items()))))

    caches = (choose, linear._prepare_all, linear._prepared)
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setattr(plans, "num_processors", lambda: PROCESSORS)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.setattr(native, "has_wgmma", lambda: True)
    monkeypatch.setattr(native, "compile_ahead", lambda *a: note("ahead", *a))
    monkeypatch.setattr(native, "function", lambda *a: note("launched", *a))
    monkeypatch.setattr(native, "launch", lambda *a, **b: None)
    yield seen
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(
    ("epilogue", "has_norm", "width", "depth"),
    [
        ("plain", True, 2560, 1024),
        ("add", False, 1024, 2048),
        ("gated", True, 6144, 1024),
        ("add", False, 1024, 3072),
    ],
)
def test_what_is_compiled_ahead_is_what_launches_ask_for(
    h200: dict[str, set[Specialization]], epilogue: str, has_norm: bool, width: int, depth: int
) -> None:
    product = Product(epilogue, has_norm, width, depth, "bfloat16")
    linear._prepare_all(product)
    weight, norm = torch.empty(width, depth).bfloat16(), torch.empty(depth).bfloat16()
    for rows in ROWS:
        plan = choose(product, rows)
        if plan == LIBRARY:
            continue
        x = torch.empty(rows, depth).bfloat16()
        own = norm if plan.kind == "gemv" and has_norm else None
        residual = torch.empty(rows, width).bfloat16() if epilogue == "add" else None
        y = torch.empty(rows, width).bfloat16()
        linear._launch(plan, epilogue, x, own, 1e-5, weight, None, residual, y)
    assert h200["launched"] == h200["ahead"] and len(h200["ahead"]) >= 3


@pytest.mark.parametrize("epilogue", ["plain", "gated"])
@pytest.mark.parametrize("depth", [64, 640, 1024, 4096, 14336])
@pytest.mark.parametrize("width", [64, 896, 2560, 6144, 24576])
@pytest.mark.usefixtures("h200")
def test_blocks_fit_and_are_divided_only_to_fill_the_processors(
    width: int, depth: int, epilogue: str
) -> None:
    for rows in ROWS:
        plan = choose(Product(epilogue, False, width, depth, "bfloat16"), rows)
        if rows <= 16:
            assert plan.kind == "gemv" and depth % (32 * plan.warps) == 0
        if plan.kind == "gemm":
            bytes_each = shared_bytes(plan.rows, plan.columns, plan.stages, plan.split)
            blocks = -(-width // plan.columns) * -(-rows // plan.rows) * plan.split
            beside = 2 if blocks > PROCESSORS else 1
            assert (bytes_each + 1024) * beside <= MOST_SHARED + 1024 and depth // 64 >= plan.split
            assert plan.split == 1 or blocks <= 2 * PROCESSORS


@pytest.mark.usefixtures("h200")
def test_what_was_fastest_on_an_h200_is_chosen() -> None:
    """Of shapes that were measured, some of each kind."""
    for epilogue, width, depth, rows, plan in (
        ("add", 1024, 2048, 8, Plan("gemv", warps=16)),
        ("plain", 2560, 8192, 1, Plan("gemv", warps=8)),
        ("gated", 6144, 1024, 16, Plan("gemv", warps=4)),
        ("add", 1024, 3072, 32, Plan("gemm", 8, 64, 64, 12, 4)),
        ("gated", 6144, 1024, 64, Plan("gemm", 8, 64, 32, 8, 1)),
        ("plain", 8192, 14336, 64, Plan("gemm", 8, 64, 128, 8, 2)),
        ("plain", 2048, 2048, 128, Plan("gemm", 8, 128, 32, 8, 2)),
        ("plain", 8192, 8192, 128, LIBRARY),
        ("plain", 2560, 2560, 256, LIBRARY),
    ):
        assert choose(Product(epilogue, False, width, depth, "bfloat16"), rows) == plan
    assert choose(Product("plain", False, 103424, 1024, "bfloat16"), 1) == LIBRARY
