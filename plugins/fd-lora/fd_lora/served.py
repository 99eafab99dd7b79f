"""The adapters that an API server knows, by name. Requests bring name, digest and folder along, so
an engine that was restarted, or another one behind the port, finds them by itself."""

from __future__ import annotations

import json
from pathlib import Path

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.config.engine import LoRAConfig
from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.types import SequenceExtras

from .files import adapter_extras


class ServedAdapters(dict[str, SequenceExtras]):
    """What each adapter's requests bring; at first those of --lora-modules."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(operators_adapters(config))
        self._config, self.root = config, lora_settings(config).lora_root

    def read(self, name: str, path: str) -> SequenceExtras:
        """The adapter in a folder below --lora-root, to which a path may be relative.
        InvalidRequest: it is elsewhere, or cannot be used."""
        root = Path(self.root).expanduser().resolve()
        folder = (root / path).resolve()
        if "\0" in path or not folder.is_relative_to(root):
            raise InvalidRequest(
                f"{path!r:.200} is not below the folder that --lora-root names", param="lora_path"
            )
        return adapter_extras(name, str(folder), self._config)


def lora_settings(config: EngineConfig) -> LoRAConfig:
    """Of an engine that serves adapters."""
    if config.lora is None:
        raise ConfigError("this engine serves no adapters; start it with --enable-lora")
    return config.lora


def operators_adapters(config: EngineConfig) -> dict[str, SequenceExtras]:
    """Those of --lora-modules. ConfigError says what is wrong with one."""
    found: dict[str, SequenceExtras] = {}
    for text in lora_settings(config).lora_modules:
        name, path = _named(text)
        if name in found:
            raise ConfigError(f"--lora-modules names {name!r} twice")
        try:
            found[name] = adapter_extras(name, path, config)
        except InvalidRequest as error:
            raise ConfigError(f"--lora-modules {name}: {error}") from error
    return found


def _named(text: str) -> tuple[str, str]:
    """The name and the folder of one adapter: NAME=FOLDER, or vLLM's JSON."""
    name, _, path = text.partition("=")
    if text.startswith("{"):
        try:
            given = json.loads(text)
            name, path = given["name"], given["path"]
        except (ValueError, KeyError):
            name = path = ""
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ConfigError(
            f"--lora-modules has {text!r:.80}; expected NAME=FOLDER, or "
            '{"name": "NAME", "path": "FOLDER"}'
        )
    return name, path
