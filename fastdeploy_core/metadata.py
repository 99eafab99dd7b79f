"""Keeps one damaged distribution from ending whatever looks for entry points."""

from __future__ import annotations

import functools
from importlib.metadata import Distribution, PathDistribution
from typing import Any, Final

_READ_TEXT: Final[Any] = PathDistribution.read_text


def read_strictly(distribution: Distribution, filename: str) -> str | None:
    """A metadata file's text; None where there is none, UnicodeDecodeError where it is no UTF-8."""
    if isinstance(distribution, PathDistribution):
        found: str | None = _READ_TEXT(distribution, filename)
        return found
    return distribution.read_text(filename)


@functools.cache
def tolerate_damage() -> None:
    """From now on a metadata file that is no UTF-8 counts as absent, as one that cannot be opened
    does already.

    Libraries that look for their own plugins when they are imported read the entry points of every
    distribution, and one damaged file would end the import.
    """

    def tolerant(self: PathDistribution, filename: str) -> str | None:
        try:
            return read_strictly(self, filename)
        except UnicodeDecodeError:
            return None

    PathDistribution.read_text = tolerant  # type: ignore[method-assign,assignment]
