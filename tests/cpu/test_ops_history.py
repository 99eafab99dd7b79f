"""Token histories on the device against slow loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.tensor import load


def follow(tokens: list[int], least: int, most: int, number: int) -> list[int]:
    """What stood after the longest end of the tokens where it stood before, the latest such
    place."""
    for size in range(min(most, len(tokens) - 1), least - 1, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[-size:]:
                whole = tokens.copy()
                for nth in range(number):
                    whole.append(whole[begin + size + nth])
                return whole[len(tokens) :]
    return [-1] * number


@pytest.mark.parametrize("seed", range(4))
def test_matches_are_what_a_slow_loop_finds(tensor_library: str, seed: int) -> None:
    xp, rng = load(tensor_library), np.random.default_rng(seed)
    rows = np.array([3, 0, 2, 1])
    for least, most, number in ((1, 3, 4), (2, 5, 1), (2, 2, 7)):
        history = rng.integers(0, 3, (5, 40)).astype(np.int32)
        known = rng.integers(1, 38, 4)
        found = build_kernel_table("cpu", {"tensor_library": tensor_library})["match_ngrams"](
            *(xp.from_numpy(array.copy()) for array in (history, rows, known)),
            *(least, most, number),
        )
        for row, slot in enumerate(rows.tolist()):
            tokens = history[slot, : known[row]].tolist()
            assert xp.to_numpy(found)[row].tolist() == follow(tokens, least, most, number)


@pytest.mark.parametrize("width", [1, 3])
def test_only_what_was_kept_is_appended(tensor_library: str, width: int) -> None:
    xp, rng = load(tensor_library), np.random.default_rng(width)
    history = rng.integers(5, 9, (5, 20)).astype(np.int32)
    rows, computed = np.array([3, 0, 1, 4, 4]), np.array([7, 9, 0, 12, 0])
    results = rng.integers(10, 99, (5, width))
    results[0, 1:] = results[1, 2:] = -1
    results[2] = -2  # nothing at all
    wanted, given = history.copy(), xp.from_numpy(history.copy())
    for row, slot in enumerate(rows[:3].tolist()):
        kept = [token for token in results[row].tolist() if token >= 0]
        end = int(computed[slot]) + 1
        wanted[slot, end - len(kept) : end] = kept
    table: Any = build_kernel_table("cpu", {"tensor_library": tensor_library})
    table["append_history"](
        *(xp.from_numpy(array.copy()) for array in (rows, results, computed)), given
    )
    assert (xp.to_numpy(given)[:4] == wanted[:4]).all()
