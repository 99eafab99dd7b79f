"""loading/weights.py: unsafe, damaged and hostile checkpoint files (reliability rules S-03)."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_core.loading.loader import open_files
from fastdeploy_core.loading.weights import INDEX_NAME, SafetensorsFile, find_files
from fastdeploy_core.models.reading import ConfigReader
from fastdeploy_core.reference.device import CpuDevice
from tests.checkpoints import to_bfloat16, write_safetensors


@pytest.fixture(scope="module")
def device(tensor_library: str) -> CpuDevice:
    return CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))


class Bomb:
    """Unpickling it would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "model.pt", "model.pth", "model_state.pdparams", "weights.pkl", "w.npy"],
)
def test_formats_that_carry_code_are_refused_unread(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(WeightError, match=f"can carry code: {name}"):
        find_files(tmp_path)
    assert not mark.exists()


def test_a_pickle_that_calls_itself_safetensors_is_refused(
    tmp_path: Path, device: CpuDevice
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Bomb(mark)) + b"\0" * 100)
    (file,) = find_files(tmp_path)
    with pytest.raises(WeightError, match="no safetensors file"):
        SafetensorsFile(file, device)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", 3])
def test_an_index_cannot_point_elsewhere(name: object, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightError, match="expected plain file names"):
        find_files(tmp_path)


def test_an_index_cannot_name_a_pickle(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "model.bin"}}))
    with pytest.raises(WeightError, match="can carry code"):
        find_files(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_a_broken_index_is_explained(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(WeightError, match="is not a safetensors index"):
        find_files(tmp_path)


def test_rank_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeightError, match="rank folders"):
        find_files(tmp_path)


TENSORS = {
    "a": ("F32", np.arange(12, dtype=np.float32).reshape(3, 4)),
    "b": to_bfloat16(np.array([1.5, -2.0, 0.25], np.float32)),
    "c": ("I64", np.array([[7]], np.int64)),
    "empty": ("F16", np.zeros((0, 3), np.float16)),
}


def read_all(path: Path, device: CpuDevice) -> dict[str, np.ndarray]:
    return {
        name: np.array(device.to_host(tensor.read()))
        for name, tensor in SafetensorsFile(path, device).tensors()
    }


def test_regions_and_dtypes_are_read(tmp_path: Path, device: CpuDevice) -> None:
    write_safetensors(tmp_path / "x.safetensors", TENSORS)
    tensors = dict(SafetensorsFile(tmp_path / "x.safetensors", device).tensors())
    assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {
        "a": ((3, 4), "float32"),
        "b": ((3,), "bfloat16"),
        "c": ((1, 1), "int64"),
        "empty": ((0, 3), "float16"),
    }
    part = device.to_host(tensors["a"].read(slice(1, 3), slice(0, 2)))
    np.testing.assert_array_equal(part, [[4.0, 5.0], [8.0, 9.0]])
    widened = device.to_host(tensors["b"].read().to(device.xp.float32))
    np.testing.assert_array_equal(widened, [1.5, -2.0, 0.25])


def entry(dtype: str, shape: list[Any], *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)},  # overlap
        {"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 12, 16)},  # hole
        {"a": entry("F32", [4], 0, 16), "b": entry("F32", [1], 16, 20)},  # beyond the file
        {"a": entry("F32", [2], 0, 8)},  # bytes that belong to nothing
        {"a": entry("F32", [3], 0, 16)},  # shape does not fill the bytes
        {"a": entry("F32", [-2, -2], 0, 16)},
        {"a": entry("F32", [2**62, 4], 0, 16)},
        {"a": entry("F32", [4.0], 0, 16)},
        {"a": entry("F32", [True, 4], 0, 16)},
        {"a": entry("F32", "4", 0, 16)},
        {"a": entry("F32", [4], 0)},
        {"a": entry("F32", [4], 16, 0)},
        {"a": entry("F99", [4], 0, 16)},
        {"a": entry(["F32"], [4], 0, 16)},  # type: ignore[arg-type]
        {"a": 3},
        [1, 2],
    ],
)
def test_a_lying_header_is_refused(header: Any, tmp_path: Path, device: CpuDevice) -> None:
    raw = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    with pytest.raises(WeightError, match="damaged"):
        SafetensorsFile(path, device)


def test_a_name_twice_is_refused(tmp_path: Path, device: CpuDevice) -> None:
    one = json.dumps(entry("F32", [4], 0, 16))
    raw = f'{{"a": {one}, "a": {one}}}'.encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    with pytest.raises(WeightError, match="occurs twice"):
        SafetensorsFile(path, device)


@pytest.mark.parametrize("content", [b"", b"\1\0\0", b"\xff" * 40, (2**40).to_bytes(8, "little")])
def test_a_cut_off_file_is_refused(content: bytes, tmp_path: Path, device: CpuDevice) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightError, match="no safetensors file"):
        SafetensorsFile(path, device)


def test_500_damaged_headers_are_refused_or_harmless(tmp_path: Path, device: CpuDevice) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, TENSORS)
    good, whole = path.read_bytes(), read_all(path, device)
    header_end = 8 + int.from_bytes(good[:8], "little")
    chance = random.Random(5)
    refused = 0
    for _ in range(500):
        damaged = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(header_end)
            if chance.random() < 0.3:
                del damaged[place]
            else:
                damaged[place] = chance.choice(b'0123456789{}[]",:F\xff\x00') & 0xFF
        path.write_bytes(damaged)
        try:
            found = read_all(path, device)
        except WeightError:
            refused += 1
            continue
        # What still opens has only other names, or the same bytes under another shape or dtype.
        assert sum(a.nbytes for a in found.values()) == sum(a.nbytes for a in whole.values())
    assert refused > 300


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, device: Any) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"x": ("F32", np.ones((64, 64), np.float32))})
    (_, stored), *_ = SafetensorsFile(path, device).tensors()
    buffer = np.zeros(64 * 64 * 4, np.uint8)
    stored.fill((slice(0, 64), slice(0, 64)), 0, buffer)
    assert (buffer.view(np.float32) == 1).all()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(WeightError, match="became shorter"):
        stored.fill((slice(0, 64), slice(0, 64)), 0, buffer)


def test_a_link_to_what_is_gone_is_explained(tmp_path: Path, device: CpuDevice) -> None:
    """As in a download folder whose blobs were removed."""
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(WeightError, match=r"cannot be read: .*No such file.*model\.safetensors"):
        open_files(tmp_path, device)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_number_of_the_configuration_is_finite(value: str) -> None:
    config = json.loads(f'{{"architectures": ["A"], "rms_norm_eps": {value}}}')
    with pytest.raises(ConfigError, match=r"rms_norm_eps=.*expected a finite number"):
        ConfigReader(config).number("rms_norm_eps", default=1e-6)
