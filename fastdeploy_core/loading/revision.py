"""Which weights a model has, whatever folder they lie in: for what is kept beyond an engine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

_NUM_SAMPLES: Final = 256  # places of each file that are read
_SAMPLE_BYTES: Final = 4096


def revision(path: Path) -> str:
    """A digest of a model's files: their names, sizes, and content at places all over them. The
    same on every host; files of at most 1 MiB are read whole."""
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    digest = hashlib.sha256()
    for file in files:
        if not file.is_file() or file.name.startswith("."):
            continue
        size = file.stat().st_size
        digest.update(f"{len(file.name)} {file.name} {size}\n".encode())
        step = max(_SAMPLE_BYTES, size // _NUM_SAMPLES)
        with file.open("rb") as opened:
            for place in range(0, size, step):
                opened.seek(place)
                digest.update(opened.read(_SAMPLE_BYTES))
            opened.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
