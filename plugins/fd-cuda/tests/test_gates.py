"""Kernels around recurrences against their definitions in fd-models: on the GPU, or in Triton's
interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fd_models.recurrent import gates
from test_kernels import DEVICE, HAS_GPU

from fastdeploy_testing.drivers import build_kernel_table

DTYPES = [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32]
TOKENS = (0, 1, 5)


def kernel(plain: Any) -> Any:
    found = build_kernel_table("cuda", {"tensor_library": "torch"})[plain.__name__]
    assert found is not plain
    return found


def check(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == wanted.shape
    error = (got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    assert error < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_gated_norm_of_gates_beside_other_outputs(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    run = kernel(gates.gated_norm)
    for heads, width, is_wide, gate_first in ((3, 128, False, False), (2, 40, True, True)):
        x = torch.randn(tokens, heads, width).to(DEVICE, dtype)
        beside = torch.randn(tokens, 8 + heads * width).to(DEVICE, dtype)
        gate = beside[:, 8:].reshape(x.shape)
        weight = torch.randn((heads, width) if is_wide else (width,)).to(DEVICE, dtype)
        wide = (x.double(), gate.double(), weight.double())
        wanted = gates.gated_norm(*wide, 1e-6, gate_first)
        check(run(x, gate, weight, 1e-6, gate_first), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_gates_of_every_output_or_of_all(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    run, heads, dim = kernel(gates.add_gated), 3, 600
    both = torch.randn(tokens, heads, 2 * dim).to(DEVICE, dtype)
    y, total = torch.randn(2, tokens, heads * dim).to(DEVICE, dtype)
    for gate in (both[:, :, dim:], both[:, :1, :1]):
        for sum_to in (None, total):
            wide = None if sum_to is None else sum_to.double()
            wanted = gates.add_gated(wide, gate.double(), y.double())
            check(run(sum_to, gate, y), wanted, dtype)


@pytest.mark.parametrize("sizes", [(128, 128, 256, 256), (2, 2), (5, 3, 7)], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_outputs_in_groups_come_part_by_part(tokens: int, sizes: tuple[int, ...]) -> None:
    beside = torch.randn(tokens, 8 + 3 * sum(sizes)).to(DEVICE)
    x = beside[:, 8:]
    assert torch.equal(kernel(gates.regroup)(x, 3, sizes), gates.regroup(x, 3, sizes))
