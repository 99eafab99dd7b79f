"""`fastdeploy mycommand NAME`: says hello."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_core.contracts.command import CommandParser


def main(arguments: Sequence[str]) -> int:
    """Say hello; the exit code is returned."""
    parser = CommandParser(prog="fastdeploy mycommand", description="Say hello.")
    parser.add_argument("name", help="whom to greet")
    print("hello", parser.parse_args(arguments).name)
    return 0
