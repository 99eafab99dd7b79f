"""Writes a checkpoint shard by shard, so that a stopped run can be continued.

Complete shards are in the output folder under working names, each written whole or not at all, with
a state file that names their run. finish() gives them their final names and writes the index and
config.json last; until then the folder is no model.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.errors import ConfigError
from fastdeploy_core.loading.weights import INDEX_NAME, SafetensorsFile

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.loading.weights import SafetensorsTensor

STATE_NAME: Final = "quantize-state.json"
REPORT_NAME: Final = "quantization_report.json"
SHARD_BYTES: Final = 1 << 30
_SPELLING: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_ALIGN: Final = 8


class CheckpointWriter:
    """Collects tensors, writes them as shards, and knows the shards of earlier runs."""

    def __init__(self, folder: Path, state: Mapping[str, Any], device: DeviceBackend) -> None:
        self._folder, self._device = folder, device
        self._pending: dict[str, tuple[str, tuple[int, ...], np.ndarray]] = {}
        self._pending_bytes = 0
        self.report: dict[str, dict[str, Any]] = {}
        self._written: dict[str, Path] = {}
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._resume(state)

    def _resume(self, state: Mapping[str, Any]) -> None:
        path = self._folder / STATE_NAME
        if not path.exists():
            there = sorted(p.name for p in self._folder.iterdir())
            if there:
                raise ConfigError(
                    f"output folder {self._folder} is not empty: {', '.join(there[:5])}; choose "
                    "another with --output, or empty it"
                )
            path.write_text(json.dumps({"run": dict(state)}, indent=1) + "\n", "utf-8")
            return
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}; empty the folder") from None
        earlier = found.get("run") or {}
        other = [f"{key} {earlier.get(key)!r}" for key in state if earlier.get(key) != state[key]]
        if other:
            raise ConfigError(
                f"output folder {self._folder} holds an unfinished run of another model or with "
                f"other settings: {', '.join(other)}; choose another folder with "
                "--output, or empty it"
            )
        for shard in sorted(self._folder.glob("part-*.safetensors")):
            for name in SafetensorsFile(shard, self._device).entries:
                self._written[name] = shard
        report = self._folder / REPORT_NAME
        if report.exists():
            self.report = json.loads(report.read_text("utf-8"))

    @property
    def num_written(self) -> int:
        """Tensors that are safe on disk."""
        return len(self._written)

    def has(self, name: str) -> bool:
        """Whether the tensor is written or waits to be."""
        return name in self._written or name in self._pending

    def read(self, name: str) -> Any:
        """A tensor that is on disk, on the device."""
        file = SafetensorsFile(self._written[name], self._device)
        found: SafetensorsTensor = dict(file.tensors())[name]
        return found.read()

    def add(self, name: str, dtype: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
        """Add a tensor as bits; it is written by the next flush, which a full shard causes."""
        self._pending[name] = (_SPELLING[dtype], tuple(shape), np.ascontiguousarray(array))
        self._pending_bytes += array.nbytes
        if self._pending_bytes >= SHARD_BYTES:
            self.flush()

    def add_tensor(self, name: str, tensor: Any) -> None:
        """A device tensor."""
        xp = self._device.xp
        array = np.array(xp.to_numpy(xp.to_device(tensor, "cpu").contiguous()))
        self.add(name, xp.dtype_name(tensor), array, tuple(int(n) for n in tensor.shape))

    def flush(self) -> None:
        """Write all waiting tensors as a shard, then update the report."""
        if not self._pending:
            return
        number = len(list(self._folder.glob("part-*.safetensors"))) + 1
        path = self._folder / f"part-{number:05d}.safetensors"
        with _writing(self._folder):
            _write_safetensors(path, self._pending)
            self._written.update(dict.fromkeys(self._pending, path))
            self._pending, self._pending_bytes = {}, 0
            _replace(self._folder / REPORT_NAME, json.dumps(self.report, indent=1) + "\n")

    def finish(self, source: Path, config: Mapping[str, Any]) -> None:
        """Set final names, then write the index, the other files of the model folder, and
        config.json last."""
        self.flush()
        with _writing(self._folder):
            self._finish(source, config)

    def _finish(self, source: Path, config: Mapping[str, Any]) -> None:
        parts = sorted(self._folder.glob("part-*.safetensors"))
        names = {
            part: f"model-{n:05d}-of-{len(parts):05d}.safetensors"
            for n, part in enumerate(parts, 1)
        }
        weight_map = {name: names[path] for name, path in sorted(self._written.items())}
        size = sum(part.stat().st_size for part in parts)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        for part, name in names.items():
            part.replace(self._folder / name)
        _replace(self._folder / INDEX_NAME, json.dumps(index, indent=1) + "\n")
        for file in sorted(source.iterdir()):
            keeps = file.suffix in (".json", ".jinja", ".txt", ".model")
            if keeps and file.is_file() and file.name not in ("config.json", INDEX_NAME):
                shutil.copyfile(file, self._folder / file.name)
        _replace(self._folder / "config.json", json.dumps(dict(config), indent=1) + "\n")
        (self._folder / STATE_NAME).unlink()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns errors of the file system into messages."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"output folder {folder} cannot be written: {error.strerror or error}; make room "
            "or choose another with --output; a run that was stopped goes on where it was"
        ) from None


def _replace(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, "utf-8")
    scratch.replace(path)


def _write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], np.ndarray]]
) -> None:
    """A whole file or none. numpy lacks bfloat16 and float8, so bits and names of dtypes are
    written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, array) in tensors.items():
        stop = position + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    scratch = path.with_suffix(".tmp")
    with scratch.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for _, _, array in tensors.values():
            file.write(array.tobytes())
    scratch.replace(path)
