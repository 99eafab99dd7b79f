"""Typed access to the settings and tensors of a GGUF file; errors name what has a wrong type or
size."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_core.errors import ConfigError, WeightError

from .reader import GGUFModel, GGUFTensor


class Settings:
    """Typed access to the settings below the architecture's name."""

    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        self.architecture = str(model.settings.get("general.architecture", ""))

    def get(self, key: str) -> Any:
        return self.model.settings.get(f"{self.architecture}.{key}")

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(key)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].tolist()  # one value per block, all equal
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            shown = value.tolist()[:8] if isinstance(value, np.ndarray) else value
            raise ConfigError(
                f"{self.model.path}: setting {self.architecture}.{key} is {shown!r:.60}; expected "
                f"a whole number from {least} up, the same for every block"
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value):
            raise ConfigError(
                f"{self.model.path}: setting {self.architecture}.{key} is {value!r:.60}; expected "
                "a number"
            )
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(
                f"{self.model.path}: setting {self.architecture}.{key} is {value!r:.60}; expected "
                "true or false"
            )
        return bool(value)

    def tensor(self, name: str, *shape: int) -> GGUFTensor:
        """A tensor that must be there; 0 in `shape` stands for any size."""
        found = self.model.tensors.get(name)
        if found is None:
            raise WeightError(f"{self.model.path} has no tensor {name}; finish the download")
        fits = len(found.shape) == len(shape) and all(
            not wanted or wanted == size for wanted, size in zip(shape, found.shape, strict=True)
        )
        if not fits:
            raise WeightError(
                f"{self.model.path}: tensor {name} has shape {list(found.shape)}; the settings of "
                f"the file ask for {[size or 'any' for size in shape]}"
            )
        return found

    def has(self, name: str) -> bool:
        return name in self.model.tensors
