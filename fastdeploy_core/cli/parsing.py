"""Command-line and YAML forms of the argument table: text in, a mapping of inside names out.

Built on argparse for help and values; what argparse cannot do is done before it: dotted JSON
options, refused arguments with their reason, underscores, unknown names with the nearest valid one.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdeploy_core.config.argument_table import PART_SPELLINGS, Argument
from fastdeploy_core.config.argument_values import (
    ARGUMENTS,
    BY_SPELLING,
    NEGATIVE,
    normalise,
    part_value,
    rows_of,
    spelling,
    unknown_argument,
)
from fastdeploy_core.config.other_flags import OTHER_FLAGS, SHORT, answer
from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.errors import ConfigError

_FLAG = re.compile(r"--|-[A-Za-z]")  # and not a negative number
_LEVEL = re.compile(r"^-O(?=\d)")  # vLLM's -O2
_SHORT = SHORT | {short: row.name for row in ARGUMENTS.values() for short in row.short}
_DOTTED = re.compile(r"--([A-Za-z][\w-]*)\.([\w.-]+)")


def whole(low: int) -> Callable[[str], int]:
    """argparse's `type` of a command's own whole numbers from `low` on."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"expected a whole number from {low} on, got {text!r}")
        return value

    return convert


class TableParser(CommandParser):
    """A parser for rows of the argument table."""

    scopes: frozenset[str] = frozenset()

    def help_of(self, word: str) -> str:
        """Help of groups and arguments with a word in their names, as vLLM's --help=WORD."""
        name = "" if word == "all" else spelling(word).lower().removesuffix("config")
        for group in self._action_groups:
            if name not in spelling(str(group.title)).lower().replace(" ", "_"):
                own = group._group_actions
                own[:] = [a for a in own if any(name in spelling(s) for s in a.option_strings)]
        return self.format_help()


def build_parser(
    prog: str, description: str, scopes: Iterable[str], positional_model: bool = True
) -> TableParser:
    """A parser for the rows of these scopes, grouped for help."""
    usage = f"{prog} {'[MODEL] ' if positional_model else ''}[--config FILE] [arguments]"
    parser = TableParser(prog=prog, usage=usage, description=description, allow_abbrev=False)
    if positional_model:
        parser.add_argument(
            "model_positional", nargs="?", metavar="MODEL", help="model folder; also --model"
        )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of arguments; flags win over it"
    )
    parser.scopes = frozenset(scopes)
    groups: dict[str, Any] = {}
    for row in rows_of(parser.scopes):
        if row.group not in groups:
            groups[row.group] = parser.add_argument_group(row.group)
        _add(groups[row.group], row)
    return parser


def _add(group: Any, row: Argument) -> None:
    flags = [*row.short, *("--" + s.replace("_", "-") for s in row.spellings)]
    shown = "" if row.default in (None, "", False) else f" (default: {row.default})"
    options: dict[str, Any] = {"dest": row.name, "default": argparse.SUPPRESS}
    options["help"] = row.help + ("" if row.type == "bool" else shown)
    if row.type == "bool":
        on = " (default: on)" if row.default else " (default: off)"
        options.update(action=argparse.BooleanOptionalAction, help=row.help + on)
    elif row.type in ("list", "ints"):
        options.update(metavar=row.name.upper())
        if row.repeatable:
            options["action"] = "append"
        else:
            options["nargs"] = "+"
    else:
        options["metavar"] = "{" + ",".join(row.choices) + "}" if row.choices else row.type.upper()
    group.add_argument(*flags, **options)
    for other in row.negative:
        group.add_argument(
            "--" + other.replace("_", "-"),
            dest=row.name,
            action="store_false",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def parse(parser: TableParser, argv: Sequence[str]) -> tuple[dict[str, Any], argparse.Namespace]:
    """Typed values by inside name (YAML file below flags), and what belongs to no table row."""
    own = {s for action in parser._actions for s in action.option_strings}
    if asked := [token for token in argv if token.startswith("--help=")]:
        print(parser.help_of(asked[0].removeprefix("--help=")))
        raise SystemExit
    rest, dotted = _prepare(argv, own)
    namespace, unknown = parser.parse_known_args(rest)
    for token in unknown:
        if token.startswith("-"):
            if spelling(token.split("=")[0]) in BY_SPELLING:
                raise ConfigError(f"{token.split('=')[0]} is not an argument of {parser.prog}")
            raise unknown_argument(token.split("=")[0], parser.prog, own)
        raise ConfigError(f"unexpected argument {token!r}; see `{parser.prog} --help`")
    given = {n: v for n, v in vars(namespace).items() if n in BY_SPELLING}
    others = {n: v for n, v in vars(namespace).items() if n not in BY_SPELLING}
    positional = others.pop("model_positional", None)
    if positional is not None and given.setdefault("model", positional) != positional:
        raise ConfigError(
            f"two models are given: {positional!r} and --model {given['model']!r}; give one"
        )
    values = read_config_file(others.get("config"))
    # A file may serve several commands: what belongs to another part of it is left out.
    values = {n: v for n, v in values.items() if BY_SPELLING[n].scope in parser.scopes}
    flags = normalise(given)
    for name, options in dotted.items():
        start = flags[name] if name in flags else values.get(name)
        flags[name] = _merge(start or {}, options, name)
    values.update(flags)
    return values, argparse.Namespace(**others)


def _prepare(argv: Sequence[str], own: set[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Take out dotted options and those without a row; write underscores as dashes."""
    rest: list[str] = []
    dotted: dict[str, dict[str, Any]] = {}
    index = 0
    while index < len(argv):
        token = argv[index]
        index += 1
        if token == "--":  # noqa: S105 - the separator, not a secret
            return rest + list(argv[index - 1 :]), dotted
        flag, equals, value = _LEVEL.sub("-O=", token).partition("=")
        short, dot, part = flag.partition(".")
        if short in _SHORT:
            flag = "--" + _SHORT[short].replace("_", "-") + dot + part
        if not flag.startswith("--"):
            rest.append(token)
            continue
        name = spelling(flag)
        following = argv[index] if index < len(argv) and not argv[index].startswith("--") else None
        match = _DOTTED.fullmatch(flag)
        if match is not None and spelling(match[1]) in OTHER_FLAGS:
            name = spelling(match[1])
        is_dotted = match is not None and spelling(match[1]) in BY_SPELLING
        if is_dotted or name in PART_SPELLINGS:
            if not equals:
                if following is None:
                    raise ConfigError(f"{flag} needs a value")
                value, index = following, index + 1
            if match is not None and is_dotted:
                _put_dotted(dotted, spelling(match[1]), match[2], _json_or_text(value))
            else:
                whole, part = PART_SPELLINGS[name]
                _put_dotted(dotted, whole, part, part_value(whole, value))
        elif _is_other(name, flag, own):
            index = _answer_other(name, flag, value if equals else None, argv, index)
        else:
            rest.append("--" + name.replace("_", "-") + equals + value)
    return rest, dotted


def _is_other(name: str, flag: str, own: set[str]) -> bool:
    """A known name that has no row; `--no-x` of a switch asks for nothing."""
    if flag in own or name in BY_SPELLING or name in NEGATIVE:
        return False
    switch = name.removeprefix("no_")
    return name in OTHER_FLAGS or (switch in OTHER_FLAGS and OTHER_FLAGS[switch].value == "none")


def _answer_other(name: str, flag: str, value: str | None, argv: Sequence[str], index: int) -> int:
    """Answer it with the words that follow it; the index of the first word that is not its own."""
    if name not in OTHER_FLAGS:
        answer(name.removeprefix("no_"), False, flag)
        return index
    takes = OTHER_FLAGS[name].value
    words = [] if value is None else [value]
    while takes != "none" and index < len(argv) and not _FLAG.match(argv[index]):
        if words and takes == "one":
            break
        words.append(argv[index])
        index += 1
    answer(name, True if takes == "none" else " ".join(words), flag)
    return index


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put_dotted(dotted: dict[str, dict[str, Any]], name: str, path: str, value: Any) -> None:
    row = BY_SPELLING[name]
    if row.type != "json":
        raise ConfigError(f"{row.flag} is not a JSON option and has no parts like .{path}")
    place = dotted.setdefault(row.name, {})
    *parents, last = path.split(".")
    for parent in (p.replace("-", "_") for p in parents):
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{row.flag}.{path}: {parent} is a value and cannot have parts")
    place[last.replace("-", "_")] = value


def _merge(start: Any, added: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(start, Mapping):
        raise ConfigError(f"--{name.replace('_', '-')} must be a JSON object to take dotted parts")
    merged = dict(start)
    for key, value in added.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _merge(below, value, name) if both else value
    return merged


def read_config_file(path: str | None) -> dict[str, Any]:
    """Typed values of a YAML file whose keys are argument names in any spelling."""
    if path is None:
        return {}
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        content, node = yaml.safe_load(text) or {}, yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where is not None else ""
        raise ConfigError(f"--config {path!r} is not valid YAML{line}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {path!r} must map argument names to values")
    if len(content) < len(node.value if isinstance(node, yaml.MappingNode) else ()):
        raise ConfigError(f"--config {path!r} gives a name twice")
    try:
        return normalise(content)
    except ConfigError as error:
        raise ConfigError(f"--config {path!r}: {error}") from error


def parse_table(
    argv: Sequence[str],
    prog: str,
    description: str,
    scopes: Iterable[str],
    extra: Callable[[argparse.ArgumentParser], None] | None = None,
) -> tuple[dict[str, Any], argparse.Namespace]:
    """Parser and values in one call; `extra` adds a command's own options."""
    parser = build_parser(prog, description, scopes)
    if extra is not None:
        extra(parser)
    return parse(parser, argv)
