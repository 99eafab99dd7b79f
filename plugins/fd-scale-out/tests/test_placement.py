"""Maps of experts: balanced, complete, and reached with few moves; and what is refused."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fd_scale_out.experts.moving import Balance, _slots
from fd_scale_out.experts.placement import balanced_map, first_map, imbalance

from fastdeploy_core.errors import CapabilityError, ConfigError


def zipf(num_experts: int, exponent: float, seed: int) -> np.ndarray:
    """Tokens of each expert, drawn."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, num_experts + 1) ** exponent
    return rng.poisson(1e5 * rng.permutation(share / share.sum())).astype(np.float32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("exponent", [0.4, 0.8, 1.0, 1.2])
@pytest.mark.parametrize(("experts", "ranks"), [(16, 2), (64, 8), (128, 8), (160, 16), (256, 8)])
def test_one_copy_a_rank_balances_zipf_loads(
    experts: int, ranks: int, exponent: float, seed: int
) -> None:
    loads = zipf(experts, exponent, seed)
    before = first_map(experts, ranks, ranks)
    after = balanced_map(loads, before, ranks)
    assert len(after) == experts + ranks and set(after) == set(range(experts))
    by_rank = np.asarray(after).reshape(ranks, -1)
    assert all(len(set(row)) == len(row) for row in by_rank.tolist())  # no rank has one twice
    assert imbalance(loads, after, ranks) <= min(1.05, imbalance(loads, before, ranks))


def test_experts_stay_where_they_are_if_the_load_does() -> None:
    """The same loads move nothing, a little other ones only some, and none within its rank."""
    loads = [zipf(64, 0.8, 0)]
    loads += [loads[0], loads[0] * np.random.default_rng(1).uniform(0.95, 1.05, 64)]
    maps = [balanced_map(loads[0], first_map(64, 8, 8), 8)]
    maps += [balanced_map(one, maps[0], 8) for one in loads[1:]]
    assert maps[1] == maps[0]
    for before, after in pairwise(maps):
        rows = zip(np.reshape(before, (8, -1)).tolist(), np.reshape(after, (8, -1)), strict=True)
        for had, has in rows:
            assert all(has[place] == e for place, e in enumerate(had) if e in has)


@pytest.mark.parametrize("loads", [np.zeros(16), np.eye(16)[3], np.ones(16)])
def test_loads_without_shape_are_placed_too(loads: np.ndarray) -> None:
    found = balanced_map(loads, first_map(16, 8, 4), 4)
    assert len(found) == 24 and set(found) == set(range(16))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 1}, "has window; possible are num_redundant_experts, step_interval"),
        ({"step_interval": 0}, "step_interval must be a number above 0, got 0"),
        ({"num_redundant_experts": 3}, "3 cannot be divided over 2 ranks"),
        ({"num_redundant_experts": 20}, "a rank has 10 copies of the 8 experts that others have"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Balance(2, options).copies_each(16)


@pytest.mark.parametrize("weights", [(None, SimpleNamespace(shape=(3, 4), dtype=0)), object()])
def test_weights_whose_experts_cannot_be_told_apart_are_refused(weights: Any) -> None:
    with pytest.raises(CapabilityError, match="cannot move experts that a MoE driver keeps in"):
        list(_slots(weights, 4))
