"""`--weight-cache` on fd-cpu: the second start has the first one's weights and reads no matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_core.loading.weights import SafetensorsTensor
from fastdeploy_core.plugins import lookup
from tests.checkpoints import build
from tests.gguf_files import write_gguf
from tests.paged import PagedModel, load_driver

pytest.importorskip("fd_cpu._native", reason="fd-cpu is not installed")
PROMPT = ("a", [5, 9, 77, 3, 12, 60, 61, 62])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ["ernie", "qwen2", "ernie-moe", "gguf-experts"]
    return build(tmp_path_factory.mktemp("checkpoints"), names)


def start(path: Path, library: str, cache: Path | None, **options: Any) -> tuple[np.ndarray, str]:
    """Logits of a prompt, and what the start-up report says of the cache."""
    names = {"attention": "x86_paged", "moe": "x86_experts"}
    names["quantizer"] = "gguf" if path.is_file() else options.get("quantization", "")

    def drivers(kind: str, name: str) -> Any:
        return lookup(kind, name or names[kind]) if kind in names else load_driver(kind, name)

    if cache is not None:
        options["weight_cache"] = str(cache)
    model = PagedModel(path, library, device="x86", block_size=16, drivers=drivers, **options)
    logits = model.step([PROMPT])[0]
    model.close()
    said = [line for line in model.loaded.report if "weight cache" in line]
    return logits, "".join(said)


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every region of the checkpoint that is read."""
    seen: list[int] = []
    read = SafetensorsTensor.read

    def counting(self: SafetensorsTensor, *region: Any) -> Any:
        part = read(self, *region)
        seen.append(self._file.device.xp.nbytes(part))
        return part

    monkeypatch.setattr(SafetensorsTensor, "read", counting)
    return seen


@pytest.mark.parametrize("mode", ["", "wint8", "wint4"])
@pytest.mark.parametrize("variant", ["ernie", "qwen2", "ernie-moe"])
def test_the_second_start_has_the_same_weights_and_reads_no_matrix(
    checkpoints: Path,
    variant: str,
    mode: str,
    tensor_library: str,
    tmp_path: Path,
    read_bytes: list[int],
) -> None:
    options = {"dtype": "float32", **({"quantization": mode} if mode else {})}
    plain, said = start(checkpoints / variant, tensor_library, None, **options)
    assert said == ""
    read_bytes.clear()
    first, said = start(checkpoints / variant, tensor_library, tmp_path, **options)
    whole = sum(read_bytes)
    assert "written to" in said
    read_bytes.clear()
    second, said = start(checkpoints / variant, tensor_library, tmp_path, **options)
    assert "MB, from" in said
    assert np.array_equal(plain, first) and np.array_equal(first, second)
    # Norms and biases, and a table that only the embedding reads.
    assert max(read_bytes) < whole / 4
    assert sum(read_bytes) < whole / 2
    assert len(list(tmp_path.iterdir())) == 1


def test_a_gguf_file_is_kept_too(
    checkpoints: Path, tensor_library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FD_CACHE_DIR", str(tmp_path / "tokenizers"))
    file = write_gguf(checkpoints / "gguf-experts", tmp_path / "model.gguf", "Q4_0")
    first, said = start(file, tensor_library, tmp_path / "cache", dtype="float32")
    assert "written to" in said
    second, said = start(file, tensor_library, tmp_path / "cache", dtype="float32")
    assert "MB, from" in said
    assert np.array_equal(first, second)


def test_other_weights_formats_and_dtypes_have_files_of_their_own(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    for number, options in enumerate(({}, {"quantization": "wint8"}, {"quantization": "wint4"}), 1):
        start(checkpoints / "ernie", tensor_library, tmp_path, dtype="float32", **options)
        assert len(list(tmp_path.iterdir())) == number
    start(checkpoints / "qwen2", tensor_library, tmp_path, dtype="float32")
    assert len(list(tmp_path.iterdir())) == 4


def test_a_changed_checkpoint_is_read_again(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (checkpoints / "ernie").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    before, _ = start(folder, tensor_library, tmp_path / "cache", dtype="float32")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1 << 6  # the exponent of a number of the last tensor
    weights.write_bytes(data)
    after, said = start(folder, tensor_library, tmp_path / "cache", dtype="float32")
    assert "written to" in said
    assert not np.array_equal(before, after)


def test_weights_of_another_instruction_set_are_refused(
    checkpoints: Path, tensor_library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(checkpoints / "ernie", tensor_library, tmp_path, dtype="float32")
    monkeypatch.setenv("FD_CPU_ISA", "scalar")
    with pytest.raises(WeightError, match=r"laid out as 'fd-cpu .*', this is 'fd-cpu \d+ scalar'"):
        start(checkpoints / "ernie", tensor_library, tmp_path, dtype="float32")


def test_a_damaged_file_is_refused(checkpoints: Path, tensor_library: str, tmp_path: Path) -> None:
    start(checkpoints / "ernie", tensor_library, tmp_path, dtype="float32")
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 16
    file.write_bytes(data)
    with pytest.raises(WeightError, match="the checksum of a weight is wrong; delete this file"):
        start(checkpoints / "ernie", tensor_library, tmp_path, dtype="float32")


def test_a_start_that_fails_leaves_no_file(
    checkpoints: Path, tensor_library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise OSError("the disk is gone")

    monkeypatch.setattr(SafetensorsTensor, "read", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        start(checkpoints / "ernie", tensor_library, tmp_path, dtype="float32")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_and_dummy_weights_are_refused(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        start(checkpoints / "ernie", tensor_library, tmp_path / "file", dtype="float32")
    with pytest.raises(ConfigError, match="--load-format dummy has none"):
        start(checkpoints / "ernie", tensor_library, tmp_path, load_format="dummy")


def test_a_device_that_keeps_no_weights_says_so(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    model = PagedModel(checkpoints / "ernie", tensor_library, weight_cache=str(tmp_path))
    said = [line for line in model.loaded.report if "weight cache" in line]
    assert said == ["turned off: the weight cache; device cpu keeps no weights"]
    assert list(tmp_path.iterdir()) == []
