"""Attention of packed runs, as towers of pictures call it, against torch's in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from fd_cuda.attention import packed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0), reason="needs the copy engine"
)
# Single patches, ends inside tiles and at them; windows of Qwen2.5-VL, of which the last are cut.
LENGTHS = {
    "runs": [1, 30, 64, 7, 130] + ([5000, 63, 65, 777] if DEVICE == "cuda" else []),
    "windows": [64, 64, 32, 16, 64],
}
# What rounding may change; the interpreter cuts the bits of bfloat16 off.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 4e-3 if DEVICE == "cuda" else 8e-3}


def inputs(dim: int, dtype: torch.dtype, tokens: int, heads: int = 3) -> list[torch.Tensor]:
    """As a tower has them: parts of one product, here with rows after the last run."""
    torch.manual_seed(dim)
    joined = torch.randn(tokens + 5, 3 * heads, dim).to(dtype).to(DEVICE)
    return [joined[:tokens, n * heads : (n + 1) * heads] for n in range(3)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 72, 80, 128])
def test_runs_attend_within_themselves(dim: int, dtype: torch.dtype, lengths: str) -> None:
    """Nothing of a neighbour counts, whatever it holds."""
    starts = [0, *itertools.accumulate(LENGTHS[lengths])]
    given = inputs(dim, dtype, starts[-1])
    for x in given:
        x[starts[1] : starts[2]] = float("nan")
    assert packed.can_attend(*given)
    where = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    found = packed.attend(*given, where, max(LENGTHS[lengths]))
    for number, (first, end) in enumerate(itertools.pairwise(starts)):
        run = (x[first:end].transpose(0, 1).double() for x in given)
        wanted = torch.nn.functional.scaled_dot_product_attention(*run).transpose(0, 1)
        off = (found[first:end].double() - wanted).norm() / wanted.norm()
        assert off.isnan() if number == 1 else off < TOLERANCE[dtype], (first, end)


def test_what_the_copy_engine_cannot_read_is_declined() -> None:
    fine = inputs(64, torch.float16, 8)
    assert packed.can_attend(*fine)
    assert not packed.can_attend(*(x.float() for x in fine))
    assert not packed.can_attend(*fine[:2], fine[2].transpose(1, 2).contiguous().transpose(1, 2))
    assert not packed.can_attend(*inputs(12, torch.float16, 8))
    assert not packed.can_attend(*inputs(136, torch.float16, 8))
