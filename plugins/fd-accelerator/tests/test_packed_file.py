"""Files of laid-out weights: what was written comes back, and nothing else ever does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fd_accelerator.kept_weights import packed_file
from fd_accelerator.kept_weights.packed_file import PackedFile, PackedWriter

from fastdeploy_core.errors import WeightError

DRAW = np.random.default_rng(7)
WEIGHTS = {
    f"layers.{number}": (
        {"sizes": [number, 2], "dtype": "bfloat16"},
        [DRAW.integers(0, 256, size, dtype=np.uint8) for size in (257, 0, 64)[: number + 1]],
    )
    for number in range(3)
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.packed"
    writer = PackedWriter(path, "chip 1")
    for name, (facts, arrays) in WEIGHTS.items():
        writer.add(name, facts, arrays)
    assert not path.exists()  # nobody may find half of it
    assert writer.finish() == path.stat().st_size
    return path


def holds_what_was_written(path: Path) -> bool:
    file = PackedFile(path, "chip 1")
    for name, (facts, arrays) in WEIGHTS.items():
        found = file.get(name)
        if found is None or found[0] != facts or len(found[1]) != len(arrays):
            return False
        if any(not np.array_equal(a, b) for a, b in zip(found[1], arrays, strict=True)):
            return False
    return True


def test_what_was_written_comes_back_aligned(path: Path) -> None:
    assert holds_what_was_written(path)
    file = PackedFile(path, "chip 1")
    assert file.get("layers.9") is None
    for name in WEIGHTS:
        kept = file.get(name)
        assert kept is not None
        assert all(array.ctypes.data % 64 == 0 for array in kept[1] if array.size)


def test_a_dropped_file_leaves_nothing(tmp_path: Path) -> None:
    writer = PackedWriter(tmp_path / "model.packed", "chip 1")
    writer.add("a", {}, [np.zeros(9, np.uint8)])
    writer.drop()
    assert list(tmp_path.iterdir()) == []


def test_another_layout_is_refused_by_name(path: Path) -> None:
    with pytest.raises(WeightError, match=r"'chip 1', this is 'chip 2'; delete this file"):
        PackedFile(path, "chip 2")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="cannot be read: Is a directory; delete"):
        PackedFile(tmp_path, "chip 1")


def test_another_version_of_the_file_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "VERSION", 2)
    with pytest.raises(WeightError, match="it is of version 1, this is version 2"):
        PackedFile(path, "chip 1")


def mutated(raw: bytes, draw: np.random.Generator) -> bytes:
    """One damage of a kind that disks, copies and people do."""
    data, place = bytearray(raw), int(draw.integers(len(raw)))
    kind = draw.integers(5)
    if kind == 0:
        data[place] ^= 1 << int(draw.integers(8))
    elif kind == 1:
        del data[place:]
    elif kind == 2:
        data[place:place] = draw.bytes(int(draw.integers(1, 100)))
    elif kind == 3:
        del data[place : place + int(draw.integers(1, 100))]
    else:
        data[place : place + 32] = bytes(len(data[place : place + 32]))
    return bytes(data)


def test_1000_damaged_files_are_refused_or_hold_what_was_written(path: Path) -> None:
    raw, draw = path.read_bytes(), np.random.default_rng(11)
    num_refused = 0
    for _ in range(1000):
        path.write_bytes(mutated(raw, draw))
        try:
            # Only bytes between the arrays, which nobody reads, may differ.
            assert holds_what_was_written(path)
        except WeightError as error:
            num_refused += 1
            assert "cannot be used" in str(error)
    assert num_refused > 800
