"""Attention within packed runs beside torch's own, run by run."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fd_cuda.attention import packed

CUDA = torch.cuda.is_available()
LENGTHS = [1, 64, 7, 0, 150, 33]


@pytest.mark.parametrize("width", [64, 72, 80, 96, 112, 120, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_run_attends_within_itself(width: int, dtype: torch.dtype) -> None:
    """Keys and values are parts of one matrix, as towers have them; a run of NaN spoils no other
    one."""
    heads, device, total = 2, "cuda" if CUDA else "cpu", sum(LENGTHS)
    torch.manual_seed(0)
    qkv = torch.randn(total, 3 * heads, width).to(device, dtype)
    q, (k, v) = qkv[:, :heads].contiguous(), (qkv[:, n * heads : (n + 1) * heads] for n in (1, 2))
    ends = list(itertools.accumulate(LENGTHS, initial=0))
    spoilt = slice(ends[2], ends[3])
    qkv[spoilt] = float("nan")
    starts = torch.tensor(ends, dtype=torch.int32, device=device)
    assert packed.serves(q, k, v)
    found = packed.attend(q, k, v, starts, max(LENGTHS)).float()
    assert found[spoilt].isnan().all()
    for first, end in itertools.pairwise(ends):
        if first == spoilt.start or first == end:
            continue
        one, keys, values = (x[first:end].float().transpose(0, 1) for x in (q, k, v))
        wanted = scaled_dot_product_attention(one, keys, values).transpose(0, 1)
        torch.testing.assert_close(found[first:end], wanted, atol=2e-2, rtol=1e-2)
