"""Writes page.sha256: digests of the page's sources, and of the files that were built from them."""

from __future__ import annotations

import hashlib
from pathlib import Path

UI = Path(__file__).parent
BUILT = UI.parent / "fd_web" / "page"
SOURCES = ("index.html", "package.json", "package-lock.json", "vite.config.js", "public/*", "src/*")


def digests() -> str:
    """One line for each file, in the form of sha256sum, run in the folder of the plugin."""
    files = [path for pattern in SOURCES for path in UI.glob(pattern)] + list(BUILT.iterdir())
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(UI.parent)}\n"
        for path in sorted(files)
    ]
    return "".join(lines)


if __name__ == "__main__":
    (UI / "page.sha256").write_text(digests())
