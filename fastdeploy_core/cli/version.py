"""`fastdeploy version`."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_core import __version__
from fastdeploy_core.contracts.command import CommandParser


def main(argv: Sequence[str]) -> int:
    """Print the version."""
    CommandParser(prog="fastdeploy version", description=main.__doc__).parse_args(argv)
    print(f"fastdeploy {__version__}")
    return 0
