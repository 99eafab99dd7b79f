"""Models by name from a folder that all hosts see: MYHUB_FOLDER/NAME, or NAME@REVISION."""

from __future__ import annotations

import os
from pathlib import Path

from fastdeploy_core.errors import ConfigError


class MyHubSource:
    """Used in the parent process alone, which needs a folder from then on."""

    name = "myhub"
    contract = (1, 2)

    def __init__(self) -> None:
        root = os.environ.get("MYHUB_FOLDER", "")
        if not root:
            raise ConfigError("model source myhub needs the environment variable MYHUB_FOLDER")
        self._root = Path(root).resolve()

    def fetch(self, model: str, revision: str, folder: Path | None) -> Path:
        """The folder of that model. A source that downloads keeps its files in `folder`."""
        name = f"{model}@{revision}" if revision else model
        found = (self._root / name).resolve()
        if not found.is_relative_to(self._root) or not (found / "config.json").is_file():
            there = sorted(path.parent.name for path in self._root.glob("*/config.json"))
            raise ConfigError(
                f"model {name!r} is not in {self._root}; possible: {', '.join(there) or 'none'}"
            )
        return found
