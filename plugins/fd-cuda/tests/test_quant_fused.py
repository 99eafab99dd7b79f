"""Norms and activations that round what they yield: the same numbers as norm.py and then
quant_round.py make, and the same products, on the GPU or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_weights import packed
from test_kernels import HAS_GPU

from fd_cuda.kernels import norm, quant_fused, quant_linear, quant_weights
from fd_cuda.kernels.quant_round import Seen

DEVICE = "cuda" if HAS_GPU else "cpu"
EPS = 1e-5
FORMATS = ("w8a8", "w8a8_static", "w4a8", "wfp8afp8", "wfp8afp8_static", "block_fp8")
# Of outputs and inputs; rows of x.
SHAPES = [(264, 400), (1032, 1024), (520, 3584), (8192, 8192)] if HAS_GPU else [(264, 400)]
ROWS = (1, 11, 70, 130, 601) if HAS_GPU else (1, 9)


@pytest.fixture(autouse=True)
def rounds_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        monkeypatch.setattr(quant_fused, "native_runs", lambda x: True)


def both_ways(
    after: str, rows: int, weight: quant_weights.Weights, count: int, dtype: torch.dtype
) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """What the fused kernel yields, what the plain one does, and what else must be equal, in
    pairs."""
    if after == "silu":
        x = (torch.randn(rows, 2 * count + 16, device=DEVICE) * 3).to(dtype)[:, : 2 * count]
        return quant_fused.silu_and_mul(x, weight), norm.silu_and_mul(x), []
    x, residual = (torch.randn(rows, count + 8, device=DEVICE).to(dtype)[:, :count] for _ in "xr")
    scale = torch.randn(count, device=DEVICE).to(dtype)
    got, total = quant_fused.add_rms_norm(x, residual, scale, EPS, weight)
    plain, expected = norm.add_rms_norm(x, residual, scale, EPS)
    return got, plain, [total, expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if HAS_GPU else [torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("after", ["norm", "silu"])
def test_numbers_are_those_of_two_kernels(
    after: str, name: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(sum(shape))
    weight = quant_weights.prepare(packed(name, *shape, 0, 0, DEVICE))
    slabs = weight.slabs
    assert slabs is not None
    for rows in ROWS:
        got, plain, totals = both_ways(after, rows, weight, shape[1], dtype)
        assert not totals or torch.equal(*totals)
        chosen = quant_linear.choose(slabs, rows, rounds=True)
        to = weight.number_type(chosen)
        if name == "block_fp8" and to == torch.float16:
            assert torch.equal(got, plain)
            continue
        assert isinstance(got, Seen)
        seen = weight.see(plain, chosen)
        assert got.numbers.shape == seen.numbers.shape and got.numbers.dtype == to
        assert torch.equal(got.numbers[:rows].float(), seen.numbers[:rows].float())
        assert got.scales is not None and seen.scales is not None
        assert torch.equal(got.scales[:rows], seen.scales[:rows])
        if HAS_GPU:
            product = quant_linear.linear
            assert torch.equal(product(got, weight, None), product(plain, weight, None))


def test_weights_that_leave_activations_alone_get_a_plain_tensor() -> None:
    weight = quant_weights.prepare(packed("wint4", 264, 400, 0, 0, DEVICE))
    for after in ("norm", "silu"):
        got, plain, _ = both_ways(after, 3, weight, 400, torch.float16)
        assert torch.equal(got, plain)


def test_no_rows_stay_none() -> None:
    weight = quant_weights.prepare(packed("w8a8", 264, 400, 0, 0, DEVICE))
    got, _, _ = both_ways("norm", 0, weight, 400, torch.float16)
    assert quant_linear.linear(got, weight, None).shape == (0, 264)
