"""Weights that are read ahead in threads, and large dummy weights: the same numbers as read one by
one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.layers.weight_map import Placement, WeightMap
from fastdeploy_core.loading import read_ahead
from fastdeploy_core.loading.read_ahead import ReadAhead
from fastdeploy_core.loading.weights import DUMMY_NUMBERS, SafetensorsFile, dummy_tensors
from fastdeploy_core.plugins import lookup
from tests.checkpoints import to_bfloat16, write_safetensors

REGIONS = {
    "rows": (slice(3, 40), slice(0, 24)),
    "columns": (slice(0, 50), slice(8, 16)),
    "experts": (slice(0, 3), slice(2, 5), slice(0, 7)),
}
SHAPES = {"rows": (50, 24), "columns": (50, 24), "experts": (3, 8, 7), "norm": (24,)}


@pytest.fixture
def device(tensor_library: str) -> Any:
    return lookup("device", "cpu")(DeviceOptions(tensor_library=tensor_library, num_threads=1))


@pytest.fixture
def file(tmp_path: Path, device: Any) -> SafetensorsFile:
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    stored = {n: to_bfloat16(a) if n == "rows" else ("F32", a) for n, a in arrays.items()}
    write_safetensors(tmp_path / "model.safetensors", stored)
    return SafetensorsFile(tmp_path / "model.safetensors", device)


def placements(got: dict[str, np.ndarray], device: Any) -> WeightMap:
    weights = WeightMap()
    for name, shape in SHAPES.items():
        region = REGIONS.get(name, tuple(slice(0, size) for size in shape))

        def accept(tensor: Any, name: str = name) -> None:
            got[name] = device.to_host(tensor.float())

        weights.add(Placement(name, shape, region, accept))
    return weights


@pytest.mark.parametrize("buffer_bytes", [64, 200, 1 << 20])
@pytest.mark.parametrize("most_ahead", [0, 1 << 20])
def test_what_is_read_ahead_equals_what_is_read_when_asked(
    device: Any,
    file: SafetensorsFile,
    buffer_bytes: int,
    most_ahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_ahead, "_BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(read_ahead, "_MOST_AHEAD_BYTES", most_ahead)
    expected: dict[str, np.ndarray] = {}
    placements(expected, device).load(file.tensors())
    found: dict[str, np.ndarray] = {}
    weights = placements(found, device)
    with ReadAhead(device, weights) as ahead:
        assert weights.load(ahead.over(file.tensors())) == []
    assert found.keys() == expected.keys() == SHAPES.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_unknown_tensors_pass_and_are_named(device: Any, file: SafetensorsFile) -> None:
    with ReadAhead(device, WeightMap()) as ahead:
        assert sorted(WeightMap().load(ahead.over(file.tensors()))) == sorted(SHAPES)


@pytest.mark.parametrize("fill", ["normal", "bits"])
def test_large_dummy_weights_repeat_a_block_and_belong_to_one_whole(device: Any, fill: Any) -> None:
    rows = DUMMY_NUMBERS * 5 // 256
    shape, dtype = (rows, 256), "uint8" if fill == "bits" else ""
    whole = (slice(0, rows), slice(0, 256))
    made = {
        name: Placement(name, shape, whole, lambda tensor: None, fill=fill, dtype=dtype)
        for name in ("a", "b")
    }
    found = {}
    for name, stored in dummy_tensors(made, 3, device):
        array = found[name] = np.array(device.to_host(stored.read()))
        part = stored.read(slice(rows // 2, rows), slice(64, 128))
        np.testing.assert_array_equal(device.to_host(part), array[rows // 2 :, 64:128])
        if fill == "normal":
            assert abs(array.std() - 0.02) < 1e-4 and abs(array.mean()) < 1e-4
        assert len(np.unique(array[:, 0])) > (200 if fill == "bits" else 0.9 * rows)
    assert not np.array_equal(found["a"], found["b"])
    again = dict(dummy_tensors(made, 4, device))["a"].read()
    assert not np.array_equal(device.to_host(again), found["a"])
