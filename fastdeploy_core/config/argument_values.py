"""Names and values of arguments: which row a spelling means, and what type its value has.

Values come from a command line (text), a YAML file or Python keywords; all end as the row's type.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from fastdeploy_core.errors import ConfigError

from .argument_table import PART_SPELLINGS, ROWS, Argument
from .other_flags import OTHER_FLAGS, answer

ARGUMENTS: dict[str, Argument] = {row.name: row for row in ROWS}
BY_SPELLING: dict[str, Argument] = {s: row for row in ROWS for s in row.spellings}
NEGATIVE: dict[str, Argument] = {s: row for row in ROWS for s in row.negative}
NEGATIVE |= {f"no_{name}": row for name, row in BY_SPELLING.items() if row.type == "bool"}

_SUFFIXES = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}


def spelling(name: str) -> str:
    """`--max-num-seqs`, `max-num-seqs` and `max_num_seqs` are one name."""
    return name.removeprefix("--").replace("-", "_")


def unknown_argument(
    shown: str, command: str = "fastdeploy serve", own: Iterable[str] = BY_SPELLING
) -> ConfigError:
    """The error for an unknown name, with the nearest of those that the command takes."""
    always = (name for name, flag in OTHER_FLAGS.items() if flag.do == "always")
    known = {*map(spelling, own), *PART_SPELLINGS, *always} - NEGATIVE.keys()
    near = difflib.get_close_matches(spelling(shown), known, n=3, cutoff=0.6)
    names = ["--" + n.replace("_", "-") if shown.startswith("--") else n for n in near]
    hint = f"did you mean {' or '.join(names)}?" if names else f"see `{command} --help`"
    return ConfigError(f"unknown argument {shown!r}; {hint}")


def normalise(values: Mapping[str, Any]) -> dict[str, Any]:
    """Inside names and typed values for every argument given; the rest is left out."""
    result: dict[str, Any] = {}
    parts: list[tuple[str, Any]] = []
    for given, value in values.items():
        name = spelling(given)
        if name in PART_SPELLINGS:
            parts.append((name, value))
            continue
        if name in BY_SPELLING:
            row = BY_SPELLING[name]
        elif name in NEGATIVE:
            row, value = NEGATIVE[name], not coerce(NEGATIVE[name], value)
        elif name in OTHER_FLAGS:
            answer(name, value, given)
            continue
        else:
            raise unknown_argument(given)
        if row.name in result and result[row.name] != coerce(row, value):
            raise ConfigError(f"{row.name} is given twice with different values")
        result[row.name] = coerce(row, value)
    for name, value in parts:
        if value is not None:
            _put_part(result, name, value)
    return result


def part_value(whole: str, value: Any) -> Any:
    """A part's value as its section has it: a scheduler's parts stay as written, numbers of
    speculative decoding are numbers."""
    is_number = isinstance(value, str) and value.isdigit() and whole == "speculative_config"
    return int(value) if is_number else value


def _put_part(result: dict[str, Any], name: str, value: Any) -> None:
    whole, part = PART_SPELLINGS[name]
    section = result.get(whole) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{ARGUMENTS[whole].flag} must be a JSON object to take {name}")
    value = part_value(whole, value)
    if str(section.get(part, value)) != str(value):
        raise ConfigError(f"{name} and {whole}.{part} are given with different values")
    result[whole] = {**section, part: value}


def coerce(row: Argument, value: Any) -> Any:
    """The value in the argument's type and within its bounds; ConfigError otherwise."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None:
        return row.default
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value) in row.translate:
        value = row.translate[str(value)]
        if value is None:
            return row.default
    convert = {
        "str": _to_str,
        "int": _to_int,
        "float": _to_float,
        "bool": _to_bool,
        "json": _to_json,
        "list": _to_list,
        "ints": _to_ints,
    }[row.type]
    try:
        typed = convert(value)
    except (TypeError, ValueError) as error:
        shown = "the value given" if row.secret else repr(value)[:80]
        raise ConfigError(f"{row.flag} must be {_ARTICLE[row.type]}, got {shown}") from error
    if row.choices and typed not in row.choices:
        raise ConfigError(f"{row.flag} {typed!r} is unknown; possible: {', '.join(row.choices)}")
    _check_bounds(row, typed)
    return typed


_ARTICLE = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "json": "JSON",
    "list": "a list of strings that are not empty",
    "ints": "a list of integers",
}


def _check_bounds(row: Argument, value: Any) -> None:
    if row.type not in ("int", "float"):
        return
    if (row.low is not None and value < row.low) or (row.high is not None and value > row.high):
        raise ConfigError(
            f"{row.flag} must be between {row.low:.9g} and {row.high:.9g}, got {value}"
        )


def _to_str(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(value)
    return value


def _to_int(value: Any) -> int:
    if isinstance(value, str):
        text = value.strip()
        if text and text[-1] in _SUFFIXES:
            return int(float(text[:-1]) * _SUFFIXES[text[-1]])
        return int(text)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(value)
    return value


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "0", "no", "off"):
        return False
    raise TypeError(value)


def _to_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _to_list(value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(item, str) and item.strip() for item in items):
        raise TypeError(value)  # an empty key would let everybody in
    return items


def _to_ints(value: Any) -> list[int]:
    return [_to_int(item) for item in ([value] if isinstance(value, str | int) else value)]


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """`normalise(values)` completed by the table's defaults."""
    return {**{row.name: row.default for row in ROWS}, **normalise(values)}


def of_scope(values: Mapping[str, Any], scope: str) -> dict[str, Any]:
    """The entries of normalised values that belong to one scope: engine or server."""
    return {name: value for name, value in values.items() if ARGUMENTS[name].scope == scope}


def rows_of(scopes: Iterable[str]) -> list[Argument]:
    """The table's rows of these scopes, in table order."""
    wanted = set(scopes)
    return [row for row in ROWS if row.scope in wanted]
