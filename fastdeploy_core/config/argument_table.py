"""The argument table, read from arguments.json.

One row is one argument: its inside name, every spelling the original and vLLM use for it, its type,
default, bounds and help. `parts`: spellings of a part of a JSON argument; a scheduler's values stay
as written, for only the driver that declares a part knows its type. other_flags.json has the
arguments without a row.

`argument_values.py` gives names and values their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

ArgumentType = Literal["str", "int", "float", "bool", "json", "list", "ints"]
Scope = Literal["engine", "server"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. `name` in underscores is the keyword; `--name-with-dashes` the flag."""

    name: str
    type: ArgumentType
    help: str
    default: Any = None
    group: str = ""
    scope: Scope = "engine"
    aliases: tuple[str, ...] = ()  # other long spellings, in underscores
    negative: tuple[str, ...] = ()  # spellings that switch a bool off
    short: tuple[str, ...] = ()  # such as -tp
    choices: tuple[str, ...] = ()
    translate: Mapping[str, Any] = field(default_factory=dict)  # other projects' values to ours
    low: int | float | None = None
    high: int | float | None = None
    repeatable: bool = False  # a list given as --x a --x b instead of --x a b
    secret: bool = False

    @property
    def flag(self) -> str:
        """The spelling shown in help and errors."""
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every keyword spelling, the inside name first."""
        return (self.name, *self.aliases)


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    scope: Scope
    rows: list[Argument]


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[_Group]
    parts: dict[str, dict[str, str]]


_TABLE = msgspec.json.decode(Path(__file__).with_name("arguments.json").read_bytes(), type=_Table)
ROWS: tuple[Argument, ...] = tuple(
    replace(row, group=group.title, scope=group.scope)
    for group in _TABLE.groups
    for row in group.rows
)
PART_SPELLINGS: dict[str, tuple[str, str]] = {
    name: (whole, part) for whole, parts in _TABLE.parts.items() for name, part in parts.items()
}
