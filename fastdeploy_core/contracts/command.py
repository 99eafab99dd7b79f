"""Commands of `fastdeploy` that plugins add, through group `fastdeploy.commands`.

The entry point's name is what the user types: `bench` is called as `fastdeploy bench`. A dot stands
for the space of a command in a group: `plugins.check` is called as `fastdeploy plugins check`.
`fastdeploy --help` shows the summary of the distribution's metadata and imports nothing of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

from fastdeploy_core.errors import ConfigError


@runtime_checkable
class Command(Protocol):
    """The target of an entry point: a function, imported when the command is called."""

    def __call__(self, arguments: Sequence[str], /) -> int:
        """Run with the words after the command's name; returns the exit code.

        A FastDeployError becomes one line on stderr and exit code 1. SystemExit, such as argparse
        raises, keeps its code. Added in contract 1.0."""
        ...


class CommandParser(argparse.ArgumentParser):
    """argparse for a command's own arguments: a mistake is a ConfigError, which prints as one line,
    and an unknown argument is refused with the nearest known one. Added in contract 1.2."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The arguments; ConfigError names the first that is unknown."""
        found, unknown = self.parse_known_args(args, namespace)
        self._refuse(unknown)
        return found

    def _parse_known_args(self, words: list[str], *more: Any) -> Any:
        """argparse's. What is missing is told after what is unknown: it may be misspelt."""
        try:
            return super()._parse_known_args(words, *more)
        except (ConfigError, argparse.ArgumentError):
            given = [word.partition("=")[0] for word in words if word.startswith("--")]
            self._refuse([w for w in given if not any(f.startswith(w) for f in self._flags())])
            raise

    def _refuse(self, unknown: list[str]) -> None:
        if unknown:
            import difflib

            given = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(given, self._flags(), n=1)
            hint = f"did you mean {near[0]}?" if near else f"see `{self.prog} --help`"
            raise ConfigError(f"unknown argument {given!r}; {hint}")

    def error(self, message: str) -> NoReturn:
        """Called by argparse for every other mistake."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def _flags(self) -> list[str]:
        flags: list[str] = []
        for action in self._actions:
            flags += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                flags += [flag for sub in action.choices.values() for flag in sub._flags()]
        return flags
