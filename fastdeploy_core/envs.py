"""Every environment variable the project reads: a row each of environment.json.

`envs.FD_X` reads the variable now; a value of the wrong form raises ConfigError naming it. Nothing
else in the project touches os.environ for settings, so that file is the whole documentation.
`parse` of a row is a name of _PARSERS, with what it needs to know.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable. `parse` gets a stripped, non-empty text and raises ValueError."""

    name: str
    type: str
    default: Any
    doc: str
    parse: Callable[[str], Any]
    keep_empty: bool = False  # "" is a value of its own and not the same as unset

    def read(self, environ: Mapping[str, str]) -> Any:
        """The value in `environ`, or the default."""
        text = environ.get(self.name)
        if text is None or (not text.strip() and not self.keep_empty):
            return self.default
        try:
            return self.parse(text.strip())
        except ValueError as error:
            raise ConfigError(
                f"environment variable {self.name} cannot be read: got {text!r:.80}, {error}; "
                f"expected {self.type}; unset it for the default ({self.default!r})"
            ) from None


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("not a yes or no")


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError(f"not between {low:g} and {high:g}")
        return value

    return parse


def _choice(*possible: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in possible:
            raise ValueError(f"not one of {', '.join(possible)}")
        return text.lower()

    return parse


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_PARSERS: Final[dict[str, Callable[..., Callable[[str], Any]]]] = {
    "boolean": lambda: _boolean,
    "choice": _choice,
    "lower": lambda: str.lower,
    "names": lambda: _names,
    "number": _number,
    "one": lambda: lambda text: (text,),
    "text": lambda: str,
}


def _variables() -> Iterator[tuple[str, Variable]]:
    for row in json.loads(Path(__file__).with_name("environment.json").read_text("utf-8")):
        kind, *bounds = row["parse"]
        default = tuple(row["default"]) if isinstance(row["default"], list) else row["default"]
        parse = _PARSERS[kind](*bounds)
        yield row["name"], Variable(**(row | {"default": default, "parse": parse}))


VARIABLES: Final[dict[str, Variable]] = dict(_variables())


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """The value of one variable, from os.environ unless given; KeyError for an unlisted one."""
    return VARIABLES[name].read(os.environ if environ is None else environ)


def misspelt() -> Iterator[tuple[str, str]]:
    """Variables that are set and nobody reads, each with the one that is probably meant."""
    for name in sorted(os.environ.keys() - VARIABLES.keys()):
        if name.startswith("FD_") and (near := get_close_matches(name, VARIABLES, 1, 0.85)):
            yield name, near[0]


def __getattr__(name: str) -> Any:
    if name in VARIABLES:
        return read(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
