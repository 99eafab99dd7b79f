"""What is taken of a model's repository, and whether what arrived is what the hub promised.

Only weights as safetensors, settings, tokenizer files and chat templates are taken: no pickled
weights, and no code, which nothing here would run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from fastdeploy_core import envs
from fastdeploy_core.errors import ConfigError, WeightError

_SUFFIXES: Final = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken")
_FOLDERS: Final = (".", "mtp")  # the second holds the draft layers of ERNIE's checkpoints
_PLAIN: Final = re.compile(r"[\w.+=-]+(/[\w.+=-]+)?")  # no character that means more in a pattern
_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file as the hub lists it. Hashes are lower-case hex, empty where the hub gives none;
    `size` is -1 where its library alone knows it, which then compares, too."""

    name: str  # with "/" between folders
    size: int  # bytes
    sha256: str = ""
    git_sha1: str = ""  # of a git blob: what the hub has of files outside its large-file store


def choose(files: Sequence[HubFile], model: str) -> list[HubFile]:
    """The files that are downloaded. WeightError if a name would leave the model's folder or if
    there is nothing to serve."""
    for file in files:
        parts = PurePosixPath(file.name).parts
        is_inside = bool(parts) and not file.name.startswith("/") and ".." not in parts
        if not is_inside or "\\" in file.name or "\0" in file.name:
            raise WeightError(
                f"{model} lists a file named {file.name!r:.120}, which would be written outside "
                "the model's folder; nothing was downloaded; do not trust this repository"
            )
    taken = [f for f in files if _is_wanted(f.name)]
    if any(f.name.startswith("model") and f.name.endswith(".safetensors") for f in taken):
        # The same weights a second time, as another library names them.
        taken = [f for f in taken if not f.name.startswith("consolidated")]
    for file in taken:
        if not _PLAIN.fullmatch(file.name):
            raise WeightError(
                f"{model} has a file named {file.name!r:.120}; possible are letters, digits and "
                "._+=-; download the model by other means and pass its folder"
            )
    if not any(f.name.endswith(".safetensors") for f in taken):
        weights = {PurePosixPath(f.name).suffix for f in files} & {".bin", ".pt", ".pdparams"}
        others = f" (it has {', '.join(sorted(weights))}, which are pickled)" if weights else ""
        raise WeightError(
            f"{model} has no *.safetensors{others}; only these are downloaded; name a repository "
            "that has them, such as one that ends in -Paddle or -PT"
        )
    if not any(f.name == "config.json" for f in taken):
        raise WeightError(f"{model} has no config.json; is it a model's repository?")
    return taken


def _is_wanted(name: str) -> bool:
    path = PurePosixPath(name)
    return str(path.parent) in _FOLDERS and path.suffix in _SUFFIXES


def is_complete(folder: Path) -> bool:
    """Whether a model's folder from an earlier download has its settings and all its weights."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / _INDEX
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    return bool(names) and all((folder / str(name)).is_file() for name in names)


def verify(folder: Path, files: Sequence[HubFile], cache: Path) -> None:
    """Compare downloaded files with what the hub listed; WeightError for the first that differs,
    which is deleted. `cache`: links that lead out of it are refused.

    A file is read once: that it was right is noted under FD_CACHE_DIR until it changes.
    """
    root = cache.resolve()
    for file in files:
        path = folder / file.name
        real = path.resolve()
        if not real.is_relative_to(root):
            raise WeightError(
                f"{path} is a link out of the folder of downloads, to {real}; delete it and run "
                "again"
            )
        if not real.is_file():
            raise WeightError(f"{path} is missing after the download; run again")
        if real.stat().st_size == file.size and _mark(real, file).exists():
            continue
        if wrong := _difference(real, file):
            path.unlink(missing_ok=True)
            real.unlink(missing_ok=True)
            raise WeightError(
                f"{path} is not the file that the hub lists: {wrong}; it was deleted; run again, "
                "and if that does not help, do not trust this hub or what lies between"
            )
        mark = _mark(real, file)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _difference(path: Path, file: HubFile) -> str:
    size = path.stat().st_size
    if file.size >= 0 and size != file.size:
        return f"{size} bytes instead of {file.size}"
    if file.sha256:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        return "" if found == file.sha256 else f"SHA-256 {found} instead of {file.sha256}"
    if file.git_sha1:
        content = path.read_bytes()
        blob = b"blob %d\0" % len(content) + content
        found = hashlib.sha1(blob, usedforsecurity=False).hexdigest()
        return "" if found == file.git_sha1 else f"git hash {found} instead of {file.git_sha1}"
    return ""


def _mark(path: Path, file: HubFile) -> Path:
    """An empty file whose name says: this file, in this state, was the one that was listed."""
    state = f"{path}\0{path.stat().st_mtime_ns}\0{file.size}\0{file.sha256}\0{file.git_sha1}"
    try:
        cache = Path(envs.FD_CACHE_DIR).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"FD_CACHE_DIR {envs.FD_CACHE_DIR!r} leads nowhere: this user has no home; set it to a "
            "folder"
        ) from None
    return cache / "verified" / hashlib.sha256(state.encode()).hexdigest()
