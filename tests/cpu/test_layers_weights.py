"""layers/weight_map.py: which part of which checkpoint tensor reaches which layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_core.errors import WeightError
from fastdeploy_core.layers.weight_map import FusedPart, Placement, WeightMap


class Stored:
    """A stored tensor in memory that counts what is read."""

    dtype = "float32"

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape = array, array.shape
        self.elements_read = 0

    def read(self, *region: slice | int) -> Any:
        part = self.array[region]
        self.elements_read += part.size
        return Array(part)


class Array(np.ndarray):
    """numpy with the one tensor method that a swap needs."""

    def __new__(cls, array: np.ndarray) -> Array:
        return np.asarray(array).view(cls)

    def transpose(self, first: int, second: int) -> Array:  # type: ignore[override]
        return np.swapaxes(self, first, second)


def place(weights: WeightMap, name: str, shape: tuple[int, ...], *region: slice) -> list[Any]:
    taken: list[Any] = []
    full = region or tuple(slice(0, size) for size in shape)
    weights.add(Placement(name, shape, full, taken.append, is_linear=True))
    return taken


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_only_this_ranks_region_is_read() -> None:
    weights, stored = WeightMap(), Stored(numbers(8, 6))
    taken = place(weights, "a.weight", (8, 6), slice(4, 8), slice(0, 6))
    assert weights.load([("a.weight", stored)]) == []
    np.testing.assert_array_equal(taken[0], numbers(8, 6)[4:])
    assert stored.elements_read == 24


def test_paddle_layout_is_swapped_and_still_read_in_part() -> None:
    weights, stored = WeightMap(), Stored(numbers(6, 8))
    weights.swap_linear = True
    taken = place(weights, "a.weight", (8, 6), slice(4, 8), slice(0, 6))
    weights.load([("a.weight", stored)])
    np.testing.assert_array_equal(taken[0], numbers(6, 8).T[4:])
    assert stored.elements_read == 24


@pytest.mark.parametrize("swap", [False, True])
def test_a_joined_tensor_reaches_each_part(swap: bool) -> None:
    weights, whole = WeightMap(), numbers(10, 3)
    weights.swap_linear = swap
    gate = place(weights, "gate.weight", (4, 3), slice(2, 4), slice(0, 3))
    up = place(weights, "up.weight", (6, 3), slice(3, 6), slice(0, 3))
    parts = [FusedPart("gate.weight", 0), FusedPart("up.weight", 4)]
    weights.add_fused("gate_up.weight", (10, 3), parts)
    stored = Stored(np.ascontiguousarray(whole.T) if swap else whole)
    assert weights.load([("gate_up.weight", stored)]) == []
    np.testing.assert_array_equal(gate[0], whole[2:4])
    np.testing.assert_array_equal(up[0], whole[7:10])
    assert weights.missing() == []


@pytest.mark.parametrize("swap", [False, True])
def test_stacked_experts_reach_each_expert(swap: bool) -> None:
    weights, whole = WeightMap(), numbers(2, 6, 4)
    weights.swap_linear = swap
    taken = {
        (e, half): place(weights, f"{e}.{half}", (3, 4), slice(0, 3), slice(1, 2))
        for e in range(2)
        for half in ("gate", "up")
    }
    parts = [FusedPart(f"{e}.{h}", o, e) for e in range(2) for h, o in (("gate", 0), ("up", 3))]
    weights.add_fused("experts.gate_up_proj", (2, 6, 4), parts)
    stored = Stored(np.ascontiguousarray(whole.swapaxes(1, 2)) if swap else whole)
    weights.load([("experts.gate_up_proj", stored)])
    for (expert, half), got in taken.items():
        start = 0 if half == "gate" else 3
        np.testing.assert_array_equal(got[0], whole[expert, start : start + 3, 1:2])


def test_unknown_missing_renamed_ignored_and_kept_names() -> None:
    weights = WeightMap()
    place(weights, "model.a.weight", (2, 2))
    place(weights, "model.b.weight", (2, 2))
    weights.rename("ernie.", "model.")
    weights.ignore("inv_freq")
    weights.keep("model.mtp_")
    later = Stored(numbers(3))
    unknown = weights.load(
        [
            ("ernie.a.weight", Stored(numbers(2, 2))),
            ("model.rotary.inv_freq", Stored(numbers(3))),
            ("ernie.mtp_emb_norm.0.weight", later),
            ("ernie.c.weight", Stored(numbers(2, 2))),
        ]
    )
    assert unknown == ["ernie.c.weight"]
    assert weights.missing() == ["model.b.weight"]
    assert weights.kept == {"model.mtp_emb_norm.0.weight": later}
    assert later.elements_read == 0


def test_a_wrong_shape_names_weight_and_both_shapes() -> None:
    weights = WeightMap()
    place(weights, "a.weight", (2, 3))
    with pytest.raises(WeightError, match=r"a\.weight has shape \[3, 2\].*asks for \[2, 3\]"):
        weights.load([("a.weight", Stored(numbers(3, 2)))])


def test_a_weight_that_comes_twice_is_refused() -> None:
    weights = WeightMap()
    place(weights, "a.weight", (2, 2))
    place(weights, "b.weight", (2, 2))
    weights.add_fused("ab.weight", (4, 2), [FusedPart("a.weight", 0), FusedPart("b.weight", 2)])
    both = [("ab.weight", Stored(numbers(4, 2))), ("b.weight", Stored(numbers(2, 2)))]
    with pytest.raises(WeightError, match=r"b\.weight comes twice"):
        weights.load(both)
