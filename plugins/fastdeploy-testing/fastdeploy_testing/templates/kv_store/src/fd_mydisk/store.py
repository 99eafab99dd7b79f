"""Keeps each KV block in a file of one folder. Nothing is ever deleted: see README.md."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdeploy_core.errors import ConfigError


class MyDiskStore:
    """Calls come from several threads at once; the core checks what comes back."""

    name = "mydisk"
    contract = (1, 2)

    def __init__(self, options: Mapping[str, Any]) -> None:
        if set(options) != {"path"}:
            given = ", ".join(sorted(options)) or "nothing"
            raise ConfigError(f"KV store mydisk takes one option, path; got {given}")
        self._folder = Path(str(options["path"])).expanduser()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"KV store mydisk cannot use {self._folder}: {error}") from None

    def find(self, names: Sequence[str]) -> int:
        """How many of the leading names are there."""
        for number, name in enumerate(names):
            if not (self._folder / name).exists():
                return number
        return len(names)

    def get(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Fill the parts; False where there are not exactly so many bytes."""
        try:
            with (self._folder / name).open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != sum(part.nbytes for part in parts):
                    return False
                return all(file.readinto(part) == part.nbytes for part in parts)
        except OSError:
            return False

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """A file of another name first: whoever reads meanwhile gets all or nothing."""
        handle, path = tempfile.mkstemp(dir=self._folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(parts)
            os.replace(path, self._folder / name)
        except BaseException:
            os.unlink(path)
            raise

    def close(self) -> None:
        """Nothing is held open."""
