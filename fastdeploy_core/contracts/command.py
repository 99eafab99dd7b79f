"""Commands of `fastdeploy` that plugins add, through group `fastdeploy.commands`.

The entry point's name is what the user types: `bench` is called as `fastdeploy bench`. A dot stands
for the space of a command in a group: `plugins.check` is called as `fastdeploy plugins check`.
`fastdeploy --help` shows the summary of the distribution's metadata and imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Command(Protocol):
    """The target of an entry point: a function, imported when the command is called."""

    def __call__(self, arguments: Sequence[str], /) -> int:
        """Run with the words after the command's name; returns the exit code.

        A FastDeployError becomes one line on stderr and exit code 1. SystemExit, such as argparse
        raises, keeps its code. Added in contract 1.0."""
        ...
