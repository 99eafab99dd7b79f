"""What every hub has in common: cached, listed, downloaded, compared; and words for what fails."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdeploy_core.errors import ConfigError

from .files import HubFile, choose, is_complete, verify

logger = logging.getLogger(__name__)


class Unreachable(Exception):
    """The hub does not answer; what is cached may do."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A model's files at one commit."""

    commit: str
    files: Sequence[HubFile]


class HubSource(ABC):
    """A model source that asks a hub's own client library."""

    name: str
    contract = (1, 2)
    label: str  # what people call the hub

    def fetch(self, model: str, revision: str, folder: Path | None) -> Path:
        """See ModelSource of the core's contracts."""
        model, revision = self.spelled(model, revision)
        at = f"{model} at {revision}" if revision else model
        kept = self.cached(model, revision, folder)
        if kept is not None and not is_complete(kept):
            kept = None
        if is_offline():
            if kept is None:
                raise ConfigError(
                    f"{at} is not complete on this machine, and HF_HUB_OFFLINE or "
                    "TRANSFORMERS_OFFLINE forbids downloads; unset it, or pass a folder"
                )
            logger.info("%s: offline, taking %s", at, kept)
            return kept
        try:
            listing = self.listing(model, revision)
        except Unreachable as error:
            if kept is None:
                raise ConfigError(
                    f"{self.label} cannot be reached for {at}: {error}; nothing complete is on "
                    "this machine; check the network, HF_ENDPOINT and proxies, or pass a folder"
                ) from None
            logger.warning("%s: %s cannot be reached (%s), taking %s", at, self.label, error, kept)
            return kept
        wanted = choose(listing.files, model)
        place = self.place(model, listing.commit, folder)
        missing = [f for f in wanted if not _has(place, f)]
        if missing:
            _check_space(place, sum(max(0, f.size) for f in missing), model)
            place = self._download(model, listing.commit, missing, wanted, folder)
        verify(place, wanted, self.cache(folder))
        self.remember(model, revision, listing.commit, folder)
        logger.info("%s: %s commit %s in %s", at, self.label, listing.commit, place)
        return place

    def _download(
        self,
        model: str,
        commit: str,
        missing: Sequence[HubFile],
        wanted: Sequence[HubFile],
        folder: Path | None,
    ) -> Path:
        num_bytes = sum(max(0, f.size) for f in missing)
        logger.info(
            "%s: downloading %d files, %.2f GB, from %s",
            *(model, len(missing), num_bytes / 1e9, self.label),
        )
        started_at = time.monotonic()
        try:
            place = self.download(model, commit, wanted, folder)
        except Unreachable as error:
            raise ConfigError(
                f"the download of {model} from {self.label} broke off: {error}; run again: it "
                "goes on where it stopped"
            ) from None
        seconds = max(1e-3, time.monotonic() - started_at)
        logger.info(
            "%s: downloaded in %.1f s, %.1f MB/s", model, seconds, num_bytes / 1e6 / seconds
        )
        return place

    @abstractmethod
    def spelled(self, model: str, revision: str) -> tuple[str, str]:
        """Model and revision as this hub names them."""

    @abstractmethod
    def cached(self, model: str, revision: str, folder: Path | None) -> Path | None:
        """Where an earlier download lies, without asking the network."""

    @abstractmethod
    def listing(self, model: str, revision: str) -> Listing:
        """All files. ConfigError for a model or revision that the hub does not have or show;
        Unreachable if it does not answer."""

    def remember(  # noqa: B027 - only some libraries need it
        self, model: str, revision: str, commit: str, folder: Path | None
    ) -> None:
        """Note which commit a branch had, for `cached`, where the library does not."""

    @abstractmethod
    def cache(self, folder: Path | None) -> Path:
        """The folder below which this hub's library keeps downloads."""

    @abstractmethod
    def place(self, model: str, commit: str, folder: Path | None) -> Path:
        """Where that library puts the files of this commit."""

    @abstractmethod
    def download(
        self, model: str, commit: str, files: Sequence[HubFile], folder: Path | None
    ) -> Path:
        """Download these files, going on with what an earlier run has left; their folder."""


def is_offline() -> bool:
    """Whether the user's environment forbids downloads; for all hubs alike."""
    words = (os.environ.get(n, "") for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(word.strip().lower() in ("1", "true", "yes", "on") for word in words)


def shows_progress() -> bool:
    """Whether a person watches: bars are for terminals, lines of the log for files."""
    return sys.stderr.isatty()


def ernie(model: str, owner: str, others: str) -> str:
    """ERNIE's models by the owner that this hub lists them under. A name without an owner is the
    checkpoint in Paddle's layout, as FastDeploy's quick starts write it."""
    if "/" not in model and model.upper().startswith("ERNIE-"):
        model = f"{owner}/{model}" + ("" if model.endswith(("-Paddle", "-PT")) else "-Paddle")
    given, _, name = model.partition("/")
    return f"{owner}/{name}" if given == others and name.startswith("ERNIE") else model


def _has(place: Path, file: HubFile) -> bool:
    try:
        return (place / file.name).stat().st_size == file.size
    except OSError:
        return False


def _check_space(place: Path, num_bytes: int, model: str) -> None:
    there = next(p for p in (place, *place.parents) if p.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise ConfigError(
            f"{model} needs {num_bytes / 1e9:.1f} GB more in {place.parent}, where "
            f"{free / 1e9:.1f} GB are free; make room, or name another folder with --download-dir"
        )
