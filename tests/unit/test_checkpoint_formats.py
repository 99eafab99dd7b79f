"""plugins/checkpoints.py: which driver reads a model path, and what is said where none can."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core.config.model import FoundModel, read_model_config
from fastdeploy_core.errors import (
    ConfigError,
    ContractMismatch,
    PluginError,
    PluginLoadError,
    PluginNotFound,
    WeightError,
)
from fastdeploy_core.plugins.checkpoints import find_model
from tests.plugin_modules import entry, module_writer

DRIVER = """
from pathlib import Path
from fastdeploy_core.errors import WeightError
class Checkpoint:
    name, contract = "raw", (1, 0)
    def __init__(self, path):
        self.path = path
        if "damaged" in path.name:
            raise WeightError(f"{path} is damaged")
        if "surprise" in path.name:
            raise KeyError("layers")
    def config(self, quantization):
        return {"architectures": ["A"], "torch_dtype": "float16", "asked": quantization}
    def generation_config(self):
        return {"temperature": 0.5}
    def tokenizer_folder(self, cache):
        (cache / "raw").mkdir(parents=True)
        return cache / "raw"
"""


@pytest.fixture
def formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fd_plugins: Any) -> Callable[..., Any]:
    """An inventory with the format "raw", made of a module's text."""
    monkeypatch.setenv("FD_CACHE_DIR", str(tmp_path / "cache"))
    write = module_writer(tmp_path, monkeypatch)

    def make(source: str = DRIVER, **choice: Any) -> Any:
        write("raw_format", source)
        return fd_plugins(
            entry("checkpoint_format", "raw", "raw_format:Checkpoint", "fd-raw"), **choice
        )

    return make


def file(tmp_path: Path, name: str = "model.raw") -> Path:
    (tmp_path / "models").mkdir(exist_ok=True)
    path = tmp_path / "models" / name
    path.write_bytes(b"raw")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in the core's own format."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text(json.dumps({"architectures": ["B"], "dtype": "float32"}))
    (own / "model.safetensors").write_bytes(b"")
    return own


def test_a_driver_says_what_the_model_is(tmp_path: Path, formats: Any) -> None:
    inventory = formats()

    def find(path: Path, asked: Any) -> FoundModel:
        return find_model(path, asked, inventory)

    path = file(tmp_path, "model.RAW")
    config = read_model_config(path, {"quantization": "wint8"}, find)
    assert (config.checkpoint_format, config.path, config.dtype) == ("raw", path, "float16")
    assert config.hf_config["asked"] == "wint8"
    assert config.generation_config == {"temperature": 0.5}
    assert config.tokenizer_path == tmp_path / "cache" / "raw"
    own = read_model_config(path, {"tokenizer_path": tmp_path, "dtype": "float32"}, find)
    assert (own.tokenizer_path, own.dtype, own.hf_config["asked"]) == (tmp_path, "float32", "")


def test_a_folder_is_the_formats_whose_files_it_holds(
    tmp_path: Path, formats: Any, folder: Path
) -> None:
    inventory = formats()

    def format_of(path: Path, **asked: Any) -> str:
        return find_model(path, asked, inventory).checkpoint_format

    (folder / "model.raw").write_bytes(b"")
    assert format_of(folder) == ""
    (folder / "model.safetensors").unlink()
    assert format_of(folder, tokenizer_path=folder) == "raw"
    assert format_of(folder, load_format="dummy") == ""  # config.json says all that is needed
    assert format_of(folder, load_format="safetensors") == ""
    (folder / "config.json").unlink()
    (folder / "model.safetensors").write_bytes(b"")
    assert format_of(folder, tokenizer_path=folder) == "raw"
    (folder / "model.gguf").write_bytes(b"")  # known, although it is not installed
    with pytest.raises(ConfigError, match=r"in several formats: gguf, raw; pass the path"):
        format_of(folder)


def test_a_broken_driver_breaks_its_own_files_alone(
    tmp_path: Path, formats: Any, folder: Path
) -> None:
    inventory = formats("raise RuntimeError('the runtime is absent')")
    (folder / "model.raw").write_bytes(b"")
    assert find_model(folder, {}, inventory).path == folder
    with pytest.raises(PluginNotFound, match="pip install fd-gguf"):
        find_model(file(tmp_path, "model.gguf"), {}, inventory)
    with pytest.raises(PluginLoadError, match=r"'raw' of fd-raw 1\.0 .*the runtime is absent"):
        find_model(file(tmp_path), {}, inventory)


def test_a_driver_of_a_later_contract_is_refused(tmp_path: Path, formats: Any) -> None:
    inventory = formats(DRIVER.replace("(1, 0)", "(9, 0)"))
    with pytest.raises(ContractMismatch, match=r"written for contract 9\.0"):
        find_model(file(tmp_path), {}, inventory)


def test_errors_of_a_driver_name_it_unless_they_are_meant_for_the_user(
    tmp_path: Path, formats: Any
) -> None:
    inventory = formats()
    with pytest.raises(WeightError, match=r"damaged\.raw is damaged$"):
        find_model(file(tmp_path, "damaged.raw"), {}, inventory)
    with pytest.raises(PluginError, match=r"'raw' of fd-raw 1\.0 failed on .*surprise\.raw: KeyE"):
        find_model(file(tmp_path, "surprise.raw"), {}, inventory)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"disabled": ("fd-raw",)}, "named by FD_PLUGINS_DISABLED"),
        ({"allowed": ("fd-other",)}, "not named by FD_PLUGINS"),
    ],
)
def test_the_operators_choice_holds(
    tmp_path: Path, formats: Any, choice: dict[str, Any], words: str
) -> None:
    with pytest.raises(PluginNotFound, match=f"model.raw is a raw checkpoint: .*{words}"):
        find_model(file(tmp_path), {}, formats(**choice))


def test_a_format_that_is_not_installed_is_answered_with_the_command_that_installs_it(
    tmp_path: Path, formats: Any
) -> None:
    inventory = formats()
    for path in (file(tmp_path, "model.gguf"), (tmp_path / "models")):
        with pytest.raises(PluginNotFound) as caught:
            find_model(path, {}, inventory)
        assert str(caught.value) == (
            f"{path} is a gguf checkpoint: no checkpoint format driver 'gguf'; installed: raw; "
            "provided by: fd-gguf (pip install fd-gguf)"
        )


def test_a_path_that_is_no_model_lists_what_is_possible(tmp_path: Path, formats: Any) -> None:
    inventory = formats()
    with pytest.raises(
        ConfigError, match=r"is a file; expected .* of one of these formats: gguf, raw"
    ):
        find_model(file(tmp_path, "model.bin"), {}, inventory)
    with pytest.raises(ConfigError, match="is not a folder on this machine"):
        find_model(tmp_path / "nothing.raw", {}, inventory)
    with pytest.raises(ConfigError, match="is a raw checkpoint and --load-format says safetensors"):
        find_model(file(tmp_path), {"load_format": "safetensors"}, inventory)
