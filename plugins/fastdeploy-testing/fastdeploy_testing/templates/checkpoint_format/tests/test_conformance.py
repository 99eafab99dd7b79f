"""Every tensor comes back; a damaged file is an error that names it."""

from pathlib import Path

import numpy as np
import pytest
from fd_mysuffix.checkpoint import MySuffixCheckpoint

from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.errors import WeightError
from fastdeploy_core.plugins import lookup


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with (tmp_path / "model.norm.weight.mysuffix").open("wb") as file:
        np.save(file, np.arange(12, dtype="float32").reshape(3, 4))
    return tmp_path


def test_tensors_come_back_whole_and_in_part(folder: Path, fd_tensor: str) -> None:
    device = lookup("device", "cpu")(DeviceOptions(tensor_library=fd_tensor, num_threads=1))
    checkpoint = MySuffixCheckpoint(folder)
    assert checkpoint.config("")["architectures"] == ["LlamaForCausalLM"]
    ((name, stored),) = checkpoint.tensors({}, device, "float32", lambda name: True)
    assert name == "model.norm.weight" and stored.shape == (3, 4)
    assert device.to_host(stored.read()).tolist() == np.arange(12).reshape(3, 4).tolist()
    assert device.to_host(stored.read(slice(1, 2))).tolist() == [[4, 5, 6, 7]]
    device.close()


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / "model.norm.weight.mysuffix").write_bytes(b"nothing")
    with pytest.raises(WeightError, match="norm.weight.mysuffix"):
        MySuffixCheckpoint(folder).tensors({}, None, "float32", lambda name: True)
