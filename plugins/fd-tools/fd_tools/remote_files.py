"""Files behind http(s): what `run-batch` reads with GET and writes with PUT."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from fastdeploy_core.errors import ConfigError

TIMEOUT_S = 60.0  # without a byte


def is_url(name: str) -> bool:
    """Whether it is not the name of a file here."""
    return name.startswith(("http://", "https://"))


def download(url: str, target: Path) -> None:
    """Write what is behind the URL into the file; ConfigError if that cannot be had."""
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer, target.open("wb") as file:  # noqa: S310
            shutil.copyfileobj(answer, file)
    except OSError as error:
        raise ConfigError(f"{_shown(url)} cannot be read: {error}") from None


def upload(source: Path, url: str) -> None:
    """Put the file there. If it is not taken, ConfigError says where a copy is kept."""
    size = {"Content-Length": str(source.stat().st_size)}
    try:
        with source.open("rb") as file:
            request = Request(url, file, size, method="PUT")  # noqa: S310
            urlopen(request, timeout=TIMEOUT_S).close()  # noqa: S310
    except OSError as error:
        kept = shutil.copy(source, tempfile.mkdtemp(prefix="fd-batch-"))
        raise ConfigError(f"{_shown(url)} takes no PUT: {error}; it is kept as {kept}") from None


def _shown(url: str) -> str:
    """Without a password, and a query, which may be a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
