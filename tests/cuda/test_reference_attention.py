"""The reference's attention of long rows on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from fastdeploy_core.tensor import load

pytestmark = pytest.mark.device("cuda")


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("count", [1, 2, 16, 63, 64, 65, 66, 129, 150])
@pytest.mark.parametrize("before", [0, 3, 64])
def test_every_query_sees_what_the_mask_leaves(dim: int, count: int, before: int) -> None:
    xp, keys = load("torch"), count + before
    random = torch.Generator("cuda").manual_seed(count)
    q, k, v = (
        torch.randn(*shape, dim, device="cuda", generator=random)
        for shape in ((2, 2, count), (2, keys), (2, keys))
    )
    # As ReferenceAttention makes it: part of a larger triangle, after columns of zeros.
    hidden = torch.full((512, 512), float("-inf"), device="cuda").triu(1)[:count, :count]
    mask = hidden
    if before:
        mask = torch.cat((torch.zeros(count, before, device="cuda"), hidden), 1)
    found = xp.attend(q, k, v, None if count == 1 else mask, 0.25)
    scores = q.double() @ k.double().unsqueeze(1).transpose(-1, -2) * 0.25 + mask.double()
    wanted = scores.softmax(-1) @ v.double().unsqueeze(1)
    assert (found.double() - wanted).abs().max() < 1e-5
