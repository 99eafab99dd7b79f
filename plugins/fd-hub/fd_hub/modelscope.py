"""ModelScope, through modelscope-hub, which reads MODELSCOPE_ENDPOINT and MODELSCOPE_CACHE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastdeploy_core.errors import ConfigError

from .files import HubFile
from .source import HubSource, Listing, Unreachable, ernie

try:
    from modelscope_hub import HubApi
    from modelscope_hub.config import HubConfig
    from modelscope_hub.errors import (
        APIError,
        CacheNotFound,
        FileDownloadError,
        HubError,
        NetworkError,
        NotExistError,
        ServerError,
    )
except ImportError as error:
    _missing = str(error)  # who needs no ModelScope needs no client
else:
    _missing = ""

_BRANCH = "master"


class ModelScope(HubSource):
    """Models of ModelScope."""

    name = "modelscope"
    label = "ModelScope"

    def __init__(self) -> None:
        if _missing:
            raise ConfigError(
                f"ModelScope's client is not installed ({_missing}): "
                "pip install 'fd-hub[modelscope]'"
            )
        self._config = HubConfig()
        self._api = HubApi(self._config)

    def spelled(self, model: str, revision: str) -> tuple[str, str]:
        """`main` is what Hugging Face calls the branch `master`."""
        return ernie(model, "PaddlePaddle", "baidu"), _BRANCH if revision == "main" else revision

    def cached(self, model: str, revision: str, folder: Path | None) -> Path | None:
        """The snapshot of this revision, or one that an older client has left."""
        try:
            return Path(
                self._api.download_repo(
                    model,
                    "model",
                    revision=revision or None,
                    cache_dir=folder,
                    local_files_only=True,
                )
            )
        except CacheNotFound:
            return None

    def listing(self, model: str, revision: str) -> Listing:
        """Names, sizes and hashes, asked in one request."""
        try:
            found = self._api.list_repo_files(model, "model", revision=revision or _BRANCH)
        except NotExistError:
            raise ConfigError(
                f"{model!r} is neither a folder on this machine nor a model that ModelScope shows "
                f"at revision {revision or _BRANCH}; check both; a private model needs "
                "MODELSCOPE_API_TOKEN; for another hub set FD_MODEL_SOURCE"
            ) from None
        except (HubError, OSError) as error:
            raise _translated(error, model) from None
        files = [
            HubFile(f.path, f.size, sha256=(f.sha256 or "").lower()) for f in found if not f.is_dir
        ]
        return Listing(revision or _BRANCH, files)

    def cache(self, folder: Path | None) -> Path:
        """MODELSCOPE_CACHE, or the folder given."""
        return folder or Path(self._config.cache_dir)

    def place(self, model: str, commit: str, folder: Path | None) -> Path:
        """The snapshot's folder, which is named after the revision."""
        return self.cache(folder) / "models" / model.replace("/", "--") / "snapshots" / commit

    def download(
        self, model: str, commit: str, files: Sequence[HubFile], folder: Path | None
    ) -> Path:
        """Several files at a time; each is compared with its hash on the way."""
        names = [f.name for f in files]
        try:
            return Path(
                self._api.download_repo(
                    model, "model", revision=commit, cache_dir=folder, allow_patterns=names
                )
            )
        except (HubError, OSError) as error:
            raise _translated(error, model) from None


def _translated(error: Exception, model: str) -> Exception:
    if isinstance(error, NetworkError | ServerError | FileDownloadError | ConnectionError):
        return Unreachable(f"{type(error).__name__}: {error}")
    if isinstance(error, APIError):
        return ConfigError(f"ModelScope refuses {model}: {error}; check MODELSCOPE_API_TOKEN")
    return ConfigError(f"{model} cannot be kept on this machine: {error}")
