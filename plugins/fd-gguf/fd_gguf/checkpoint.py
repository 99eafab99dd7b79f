"""Driver gguf: a GGUF file as the model path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy_core.errors import ConfigError

from .folder import tokenizer_folder
from .reader import GGUFModel, find_gguf
from .settings import METHOD, PACKED, generation_config, model_config

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend

    from .weights import GGUFWeight


class GGUFCheckpoint:
    """A GGUF file as a model: contracts.small.CheckpointFormat.

    `path`: the file, the first one of a split model, or a folder with one model."""

    name = METHOD
    contract = (1, 0)

    def __init__(self, path: Path) -> None:
        self.path = find_gguf(path)
        self._model = GGUFModel(self.path)

    @property
    def files(self) -> list[Path]:
        """The parts of a split model, or the file."""
        return [file.path for file in self._model.files]

    def config(self, quantization: str) -> dict[str, Any]:
        """config.json, with a quantization_config if matrices can stay packed. Any --quantization
        except gguf decodes the file and quantizes it again."""
        config = model_config(self._model)
        packed = config.pop("quantization_config", None)
        if packed is None and quantization == METHOD:
            raise ConfigError(
                f"{self.path} has no matrix in a format that can stay packed "
                f"({', '.join(PACKED)}); leave --quantization out to compute in the model's dtype, "
                "or round anew with wint8 or wint4"
            )
        if packed is not None and quantization in ("", METHOD):
            config["quantization_config"] = {**packed, "is_kept": quantization == METHOD}
        return config

    def generation_config(self) -> dict[str, Any]:
        """Sampling defaults of the file, and the tokens that end an answer."""
        return generation_config(self._model)

    def tokenizer_folder(self, cache: Path) -> Path:
        """The tokenizer folder, made once from the file's vocabulary, in the subfolder gguf of
        `cache`."""
        return tokenizer_folder(self._model, cache / METHOD)

    def tensors(
        self,
        config: Mapping[str, Any],
        device: DeviceBackend,
        dtype: str,
        is_wanted: Callable[[str], bool],
    ) -> list[tuple[str, GGUFWeight]]:
        """The tensors in file order. A matrix whose scales are asked for comes packed."""
        from .weights import weights

        return list(weights(self._model, config, device, dtype, is_wanted))
