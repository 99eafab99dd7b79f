"""Which weights a checkpoint has, for what is kept beyond an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_NUM_SAMPLES: Final = 64  # places of each file that are read, its first and its last among them
_SAMPLE_BYTES: Final = 4096


def fingerprint(files: Iterable[Path], *, with_times: bool) -> bytes:
    """A digest of files' names, sizes and samples of their content; without their times it is the
    same on every host."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        times = f" {status.st_mtime_ns}" if with_times else ""
        digest.update(f"{file.name} {status.st_size}{times}".encode())
        last = max(0, status.st_size - _SAMPLE_BYTES)
        with file.open("rb") as opened:
            for number in range(_NUM_SAMPLES):
                opened.seek(last * number // (_NUM_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.digest()
