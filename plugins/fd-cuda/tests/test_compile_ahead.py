"""Kernels that other numbers of rows will need are compiled when a product is first met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fd_cuda.kernels import linear, native, plans
from fd_cuda.kernels.plans import LIBRARY, Product

Specialization = tuple[str, tuple[tuple[str, int], ...]]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, set[Specialization]]:
    """The shipped table of an H200; what is compiled ahead, and what launches ask for."""
    seen: dict[str, set[Specialization]] = {"ahead": set(), "launched": set()}

    def note(kind: str, name: str, defines: dict[str, int]) -> Any:
        seen[kind].add((name, tuple(sorted(defines.items()))))

    caches = (plans.card, plans._table, linear._prepare_all, linear._prepared)
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setattr(plans, "_known", {})
    monkeypatch.setattr(plans, "card", lambda: "nvidia-h200")
    monkeypatch.setattr(plans, "table_path", lambda: tmp_path / "none.json")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.setattr(native, "has_wgmma", lambda: True)
    monkeypatch.setattr(native, "compile_ahead", lambda *a: note("ahead", *a))
    monkeypatch.setattr(native, "function", lambda *a: note("launched", *a))
    monkeypatch.setattr(native, "launch", lambda *a, **b: None)
    yield seen
    for cached in caches[1:]:
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
    linear._prepare_all(epilogue, has_norm, (width, depth), torch.bfloat16)
    weight, norm = torch.empty(width, depth).bfloat16(), torch.empty(depth).bfloat16()
    for rows, plan in plans.foreseen(product).items():
        if plan == LIBRARY:
            continue
        x = torch.empty(rows, depth).bfloat16()
        own = norm if plan.kind == "gemv" and has_norm else None
        residual = torch.empty(rows, width).bfloat16() if epilogue == "add" else None
        y = torch.empty(rows, width).bfloat16()
        linear._launch(plan, epilogue, x, own, 1e-5, weight, None, residual, y)
    assert h200["launched"] == h200["ahead"] and len(h200["ahead"]) >= 3


def test_unknown_products_are_measured_first(
    h200: dict[str, set[Specialization]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FD_CUDA_TUNE", "1")
    linear._prepare_all("plain", True, (12345 * 8, 512), torch.bfloat16)
    assert not h200["ahead"]
