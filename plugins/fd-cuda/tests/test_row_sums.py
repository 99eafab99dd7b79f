"""kernels/native/row_sums.cu against float64: on the GPU where there is one, emulated elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import emulation
import pytest
import torch

from fd_cuda.kernels import native
from fd_cuda.kernels.row_sums import _function, deferred_sums, row_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and shutil.which("g++") is None, reason="needs a GPU, or g++"
)


class Emulation(emulation.Emulation):
    header = "emulated_sums.h"


@pytest.fixture(autouse=True)
def emulated(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":
        here = Emulation(tmp_path_factory.getbasetemp())
        monkeypatch.setattr(native, "function", here.function)
        monkeypatch.setattr(native, "launch", here.launch)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    _function.cache_clear()
    yield
    _function.cache_clear()


@pytest.mark.parametrize(
    ("has_norm", "depth", "parts", "rank", "splits", "dtype"),
    [
        (True, 320, 3, 16, 1, torch.bfloat16),
        (True, 576, 2, 24, 1, torch.float16),  # ranks that divide no eight warps
        (True, 2112, 1, 8, 1, torch.bfloat16),  # more than the threads hold at once
        (False, 1088, 1, 16, 3, torch.bfloat16),  # the last part is smaller
        (False, 192, 2, 64, 2, torch.float16),
    ],
)
def test_rows_have_their_own_sums(
    has_norm: bool, depth: int, parts: int, rank: int, splits: int, dtype: torch.dtype
) -> None:
    """Rows that lie apart, some without an adapter. Nothing of these is written."""
    draw = torch.Generator().manual_seed(depth)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw).to(dtype).to(DEVICE)

    x, a = random(5, depth + 8)[:, :depth], random(3, parts * rank, depth)
    weight = random(depth) if has_norm else None
    slots = torch.tensor([2, -1, 0, 2, 1], dtype=torch.int32, device=DEVICE)
    y, inner = row_sums(x, weight, 1e-5, a, rank, slots, splits)
    assert inner.shape == (splits, 5, parts * rank)
    if weight is None:
        assert y is x
    else:
        wide = x.double()
        wanted = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * weight.double()
        bound = 8e-3 if dtype == torch.bfloat16 else 1e-3
        assert float((y.double() - wanted).norm() / wanted.norm()) < bound
    for row in (slots >= 0).nonzero().flatten().tolist():
        wanted = a[slots[row]].double() @ y[row].double()
        assert torch.allclose(inner[:, row].double().sum(0), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("width", "depth", "parts", "rank", "dtype"),
    [
        (320, 448, 3, 16, torch.bfloat16),
        (576, 1032, 2, 8, torch.float16),  # shares of other sizes
        (264, 4160, 1, 32, torch.bfloat16),  # one block of a row, which takes several turns
        (256, 512, 0, 64, torch.bfloat16),  # no product follows
    ],
)
def test_norm_adds_what_the_product_before_left_out(
    width: int, depth: int, parts: int, rank: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(depth)

    def random(*size: int, spread: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=draw) * spread).to(dtype).to(DEVICE)

    x, inputs, weight = random(5, width), random(5, depth + 8)[:, :depth], random(width)
    a_before, b = random(3, rank, depth, spread=depth**-0.5), random(3, width, rank)
    a = random(3, parts * rank, width) if parts else None
    slots = torch.tensor([2, -1, 0, 2, 1], dtype=torch.int32, device=DEVICE)
    y, inner, total = deferred_sums(x, (inputs, a_before, b), weight, 1e-5, a, slots)
    wanted = x.double()
    for row in (slots >= 0).nonzero().flatten().tolist():
        slot = slots[row]
        wanted[row] += b[slot].double() @ (a_before[slot].double() @ inputs[row].double())
    assert torch.equal(total[1], x[1])
    bound = 8e-3 if dtype == torch.bfloat16 else 1e-3
    assert float((total.double() - wanted).norm() / wanted.norm()) < bound
    wide = total.double()
    wanted = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert float((y.double() - wanted).norm() / wanted.norm()) < bound
    assert inner.shape == (int(parts > 0), 5, inner.shape[2])
    if a is None:
        return
    for row in (slots >= 0).nonzero().flatten().tolist():
        wanted = a[slots[row]].double() @ y[row].double()
        assert torch.allclose(inner[0, row].double(), wanted, rtol=1e-4, atol=1e-3)
