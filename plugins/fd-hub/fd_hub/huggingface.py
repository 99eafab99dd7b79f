"""Hugging Face, through huggingface_hub, which reads HF_ENDPOINT, HF_TOKEN and HF_HUB_CACHE."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import REGEX_COMMIT_HASH, http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers, disable_progress_bars

from fastdeploy_core.errors import ConfigError

from .files import HubFile
from .source import HubSource, Listing, Unreachable, ernie, shows_progress

_SERVER_FAILED = 500
_TOO_MANY = 429
_CONNECTIONS = 4


class HuggingFace(HubSource):
    """Models of Hugging Face or of a mirror that speaks its API."""

    name = "huggingface"
    label = "Hugging Face"

    def __init__(self) -> None:
        logging.getLogger("huggingface_hub").handlers.clear()  # the root's shows the same lines
        if not shows_progress():
            disable_progress_bars()

    def spelled(self, model: str, revision: str) -> tuple[str, str]:
        """`master` is what the other hubs call the branch `main`."""
        return ernie(model, "baidu", "PaddlePaddle"), "main" if revision == "master" else revision

    def cached(self, model: str, revision: str, folder: Path | None) -> Path | None:
        """The snapshot that the cache has of this revision."""
        try:
            return Path(
                snapshot_download(
                    model,
                    revision=revision or None,
                    cache_dir=folder,
                    local_files_only=True,
                    allow_patterns=["config.json"],
                )
            )
        except (LocalEntryNotFoundError, HFValidationError):
            return None

    def listing(self, model: str, revision: str) -> Listing:
        """Names, sizes and hashes, asked in one request."""
        shown = f"{model} at revision {revision}" if revision else model
        try:
            info = HfApi().model_info(
                model,
                revision=revision or None,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
        except GatedRepoError:
            raise ConfigError(
                f"{model} is shown by Hugging Face only to those whom its owner accepted; ask for "
                "access on its page, then set HF_TOKEN"
            ) from None
        except RevisionNotFoundError:
            raise ConfigError(
                f"{model} has no revision {revision!r} on Hugging Face; expected a branch, tag or "
                "commit; leave --revision out for the default"
            ) from None
        except (RepositoryNotFoundError, HFValidationError):
            raise ConfigError(
                f"{model!r} is neither a folder on this machine nor a model that Hugging Face "
                "shows; check the spelling; a private model needs HF_TOKEN; for another hub set "
                "FD_MODEL_SOURCE to modelscope or aistudio"
            ) from None
        except (HTTPError, OSError) as error:
            raise _translated(error, shown) from None
        files = [
            HubFile(
                s.rfilename,
                int(s.size or 0),
                sha256=s.lfs.sha256 if s.lfs else "",
                git_sha1="" if s.lfs else s.blob_id or "",
            )
            for s in info.siblings or ()
        ]
        return Listing(str(info.sha), files)

    def remember(self, model: str, revision: str, commit: str, folder: Path | None) -> None:
        """The library notes only the branches that it resolves itself, and it is given commits."""
        if not REGEX_COMMIT_HASH.fullmatch(revision):
            ref = self.place(model, commit, folder).parents[1] / "refs" / (revision or "main")
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit, "utf-8")

    def cache(self, folder: Path | None) -> Path:
        """HF_HUB_CACHE, or the folder given."""
        return folder or Path(constants.HF_HUB_CACHE)

    def place(self, model: str, commit: str, folder: Path | None) -> Path:
        """The snapshot's folder; its files are links to blobs beside it."""
        name = repo_folder_name(repo_id=model, repo_type="model")
        return self.cache(folder) / name / "snapshots" / commit

    def download(
        self, model: str, commit: str, files: Sequence[HubFile], folder: Path | None
    ) -> Path:
        """Large files first, several at a time; the library then finds them in its cache."""
        large = [
            f
            for f in files
            if f.sha256 and not (self.place(model, commit, folder) / f.name).exists()
        ]
        try:
            with ThreadPoolExecutor(_CONNECTIONS, "fd-hub") as pool:
                for done in [pool.submit(self._blob, model, commit, f, folder) for f in large]:
                    done.result()
            names = [f.name for f in files]
            return Path(
                snapshot_download(model, revision=commit, cache_dir=folder, allow_patterns=names)
            )
        except (HTTPError, OSError) as error:
            raise _translated(error, model) from None

    def _blob(self, model: str, commit: str, file: HubFile, folder: Path | None) -> None:
        """Put a large file where the library keeps it. The library itself begins a file anew when
        the process before was ended in it; here the next process goes on."""
        blob = self.place(model, commit, folder).parents[1] / "blobs" / file.sha256
        partial = blob.with_name(f"{file.sha256}.partial")
        blob.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(blob.with_name(f"{file.sha256}.lock")):
            if blob.exists():
                return
            with partial.open("ab") as stream:
                if stream.tell() > file.size:
                    stream.truncate(0)
                http_get(
                    hf_hub_url(model, file.name, revision=commit),
                    stream,
                    resume_size=stream.tell(),
                    headers=build_hf_headers(),
                    expected_size=file.size,
                    displayed_filename=file.name,
                )
            partial.rename(blob)
        blob.with_name(f"{file.sha256}.lock").unlink(missing_ok=True)


def _translated(error: Exception, shown: str) -> Exception:
    """What failed outside of this machine is Unreachable, anything else is the user's to know."""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status < _SERVER_FAILED and status != _TOO_MANY:
            return ConfigError(
                f"Hugging Face refuses {shown}: {error.server_message or error}; check HF_TOKEN"
            )
        return Unreachable(f"it answers {status}")
    if isinstance(error, HTTPError | ConnectionError | TimeoutError):
        return Unreachable(f"{type(error).__name__}: {error}")
    if isinstance(error, LocalEntryNotFoundError):  # what the library makes of a lost connection
        return Unreachable(str(error.__cause__ or error).splitlines()[0])
    return ConfigError(f"{shown} cannot be kept on this machine: {error}")
