"""AI Studio, through aistudio-sdk: AISTUDIO_ACCESS_TOKEN, AISTUDIO_CACHE_HOME and STUDIO_GIT_HOST
are its.

The library compares hashes while it downloads; its listing has those of pointers, not of weights.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fastdeploy_core.errors import ConfigError

from .files import HubFile
from .source import HubSource, Listing, Unreachable, ernie

try:
    import requests
    from aistudio_sdk.errors import NotExistError
    from aistudio_sdk.file_download import TEMPORARY_FOLDER_NAME, get_model_cache_root
    from aistudio_sdk.snapshot_download import get_model_files, snapshot_download
except ImportError as error:
    _missing = str(error)  # who needs no AI Studio needs no client
else:
    _missing = ""

_BRANCH = "master"


class AIStudio(HubSource):
    """Models of AI Studio, where ERNIE's checkpoints in Paddle's layout appear first."""

    name = "aistudio"
    label = "AI Studio"

    def __init__(self) -> None:
        if _missing:
            raise ConfigError(
                f"AI Studio's client is not installed ({_missing}): pip install 'fd-hub[aistudio]'"
            )

    def spelled(self, model: str, revision: str) -> tuple[str, str]:
        """`main` is what Hugging Face calls the branch `master`."""
        return ernie(model, "PaddlePaddle", "baidu"), _BRANCH if revision == "main" else revision

    def cached(self, model: str, revision: str, folder: Path | None) -> Path | None:
        """The model's folder, which holds one revision at a time."""
        place = self.place(model, revision or _BRANCH, folder)
        return place if place.is_dir() else None

    def listing(self, model: str, revision: str) -> Listing:
        """Names of all files."""
        try:
            found, _ = get_model_files(model, revision=revision or _BRANCH)
        except NotExistError:
            raise ConfigError(
                f"{model!r} is neither a folder on this machine nor a model that AI Studio shows "
                f"at revision {revision or _BRANCH}; check both; a private model needs "
                "AISTUDIO_ACCESS_TOKEN; for another hub set FD_MODEL_SOURCE"
            ) from None
        except requests.RequestException as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        files = [HubFile(str(f["path"]), -1) for f in found if f.get("type") != "tree"]
        return Listing(revision or _BRANCH, files)

    def cache(self, folder: Path | None) -> Path:
        """AISTUDIO_CACHE_HOME, or the folder given."""
        return folder or Path(get_model_cache_root())

    def place(self, model: str, commit: str, folder: Path | None) -> Path:
        """Owner and name below the cache, as FastDeploy 2.x keeps its downloads."""
        return self.cache(folder) / model

    def download(
        self, model: str, commit: str, files: Sequence[HubFile], folder: Path | None
    ) -> Path:
        """Several files at a time. The library leaves a file that it went on with among its
        temporary ones; such a file is downloaded anew."""
        place, names = self.place(model, commit, folder), [f.name for f in files]
        os.environ.setdefault("WAIT_UNTIL_DONE", "1")  # for another process's download
        try:
            for _ in range(2):
                with contextlib.redirect_stdout(sys.stderr):  # where the library writes progress
                    snapshot_download(
                        repo_id=model,
                        revision=commit,
                        local_dir=str(place),
                        allow_patterns=names,
                    )
                if all((place / name).is_file() for name in names):
                    break
                shutil.rmtree(place / TEMPORARY_FOLDER_NAME, ignore_errors=True)
        except requests.RequestException as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        return place
