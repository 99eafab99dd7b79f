"""Few rows in the published 2-bit layout: emulated, or on the GPU."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import packed_weights
import pytest
import torch
from fastdeploy_core.contracts.quant_formats import PackedWeight
from quant_emulation import use_kernels
from test_quant_native import DEVICE, HAS_GPU, check

from fd_cuda.kernels import quant_weights
from fd_cuda.kernels.quant_layout import CCQ, Slabs
from fd_cuda.kernels.quant_native import Grouping, product
from fd_cuda.kernels.quant_shapes import Few
from fd_cuda.kernels.routing import Order

pytestmark = pytest.mark.skipif(not HAS_GPU and shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(autouse=True)
def kernels(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    use_kernels(tmp_path_factory.getbasetemp(), monkeypatch)


def maps(rows: int) -> np.ndarray:
    """[rows, 2] scales and offsets as encoders find them."""
    rng = np.random.default_rng(rows)
    return np.stack((rng.uniform(118, 122, rows), rng.uniform(-60, 480, rows)), 1).astype(
        np.float32
    )


def packed(rows: int, count: int, num_experts: int) -> tuple[Slabs, torch.Tensor]:
    """(the weight, the same in float64 by the layout's description)."""
    rng = np.random.default_rng(rows)
    many = max(1, num_experts)
    stored = rng.integers(0, 256, (many, count // 4, rows)).astype(np.uint8)
    local = rng.integers(1, 256, (many, count // 128, rows)).astype(np.uint8)
    outer = rng.uniform(0.5, 1, (many, rows)).astype(np.float32)
    own = maps(many * rows).reshape(many, 1, rows, 2)
    code = np.floor(stored.astype(np.float32) * own[..., 0] + own[..., 1] + np.float32(0.5))
    code = code.astype(np.int64)
    numbers = np.stack([(code >> shift & 63) - 32 for shift in (9, 6, 3, 0)], 2)
    nibbles = np.stack((local >> 4, local & 15), 2).reshape(many, count // 64, rows)
    dense = numbers.reshape(many, count, rows) * np.repeat(nibbles, 64, 1) * outer[:, None, :]
    held: dict[str, np.ndarray] = {
        "weight": stored,
        "scale": local,
        "super_scale": outer,
        "code_scale": own[:, 0, :, 0],
        "code_zero": own[:, 0, :, 1],
    }
    tensors = {
        key: torch.from_numpy(np.ascontiguousarray(value if num_experts else value[0])).to(DEVICE)
        for key, value in held.items()
    }
    format_ = packed_weights.CCQ
    slabs = quant_weights.prepare(PackedWeight(format_, rows, count, tensors, num_experts)).slabs
    assert slabs is not None and slabs.kind == CCQ
    return slabs, torch.from_numpy(dense.transpose(0, 2, 1).copy()).to(DEVICE)


@pytest.mark.parametrize(
    ("shape", "count", "tokens", "dtype"),
    [
        (Few(1, 4, 2, 2, 1), 640, 3, torch.bfloat16),
        (Few(2, 2, 4, 3, 1), 256, 16, torch.float16),
        (Few(2, 1, 2, 1, 1), 128, 11, torch.bfloat16),
    ],
)
def test_products(shape: Few, count: int, tokens: int, dtype: torch.dtype) -> None:
    slabs, dense = packed(72, count, 0)
    x = torch.randn(tokens, count, device=DEVICE).to(dtype)
    bias = torch.randn(72, device=DEVICE).to(dtype)
    check(product(shape, x, slabs, bias), x.double() @ dense[0].T + bias.double(), dtype)


def test_experts() -> None:
    """Rows of two experts, one of them twice, gate and up paired."""
    slabs, dense = packed(64, 128, 3)
    x = torch.randn(4, 128, device=DEVICE).bfloat16()
    slots = torch.full((16,), 4, dtype=torch.int32, device=DEVICE)
    slots[:3], slots[8] = torch.tensor([0, 2, 3], dtype=torch.int32), 1
    order = Order(slots, torch.tensor([2, 0, -1], dtype=torch.int32, device=DEVICE))
    grouping = Grouping(4, 1, order)
    got = product(Few(1, 2, 2, 2, 1), x, slabs, None, grouping=grouping, paired=True)
    gate, up = torch.einsum("tk,tnk->tn", x.double(), dense[[2, 0, 2, 2]]).chunk(2, -1)
    check(got, gate * torch.sigmoid(gate) * up, torch.bfloat16)
