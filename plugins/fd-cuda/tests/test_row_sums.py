"""kernels/native/row_sums.cu against float64: on the GPU where there is one, emulated elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import emulation
import pytest
import torch

from fd_cuda.kernels import native
from fd_cuda.kernels.row_sums import _kernel, row_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and shutil.which("g++") is None, reason="needs a GPU, or g++"
)


class Emulation(emulation.Emulation):
    header = "emulated_rows.h"


@pytest.fixture(autouse=True)
def emulated(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":
        here = Emulation(tmp_path_factory.getbasetemp())
        monkeypatch.setattr(native, "function", here.function)
        monkeypatch.setattr(native, "launch", here.launch)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    _kernel.cache_clear()
    yield
    _kernel.cache_clear()


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
