"""A folder with config.json, tokenizer.json and a file NAME.mysuffix for each tensor: numpy's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.contracts.model import StoredTensor
from fastdeploy_core.errors import WeightError

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor


class MySuffixCheckpoint:
    """The constructor reads headers at most; tensors are read when they are asked for."""

    name = "mysuffix"
    contract = (1, 0)

    def __init__(self, path: Path) -> None:
        self.path = path if path.is_dir() else path.parent

    @property
    def files(self) -> Sequence[Path]:
        """All files that tensors are read from."""
        return sorted(self.path.glob("*.mysuffix"))

    def config(self, quantization: str) -> dict[str, Any]:
        """config.json as Hugging Face writes it."""
        found: dict[str, Any] = self._read("config.json")
        return found

    def generation_config(self) -> dict[str, Any]:
        """Sampling defaults; empty without the file."""
        is_there = (self.path / "generation_config.json").exists()
        found: dict[str, Any] = self._read("generation_config.json") if is_there else {}
        return found

    def tokenizer_folder(self, cache: Path) -> Path:
        """Where tokenizer.json is."""
        return self.path

    def tensors(
        self,
        config: Mapping[str, Any],
        device: DeviceBackend,
        dtype: str,
        is_wanted: Callable[[str], bool],
    ) -> Sequence[tuple[str, StoredTensor]]:
        """Every tensor by its name, unread."""
        return [(file.stem, MySuffixTensor(file, device)) for file in self.files]

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise WeightError(f"{self.path / name} cannot be read: {error}") from None


class MySuffixTensor:
    """One file."""

    def __init__(self, file: Path, device: DeviceBackend) -> None:
        try:
            self._array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise WeightError(f"{file} cannot be read: {error}") from None
        self._device = device
        self.shape, self.dtype = self._array.shape, str(self._array.dtype)

    def read(self, *region: slice | int) -> Tensor:
        """A part of it, on the device."""
        part: Tensor = self._device.to_device(np.array(self._array[region]))
        return part
