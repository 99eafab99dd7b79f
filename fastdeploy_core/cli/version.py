"""`fastdeploy version`."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_core import __version__


def main(argv: Sequence[str]) -> int:
    """Print the version."""
    print(f"fastdeploy {__version__}")
    return 0
