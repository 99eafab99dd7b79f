"""Which commands there are: the core's own, those of installed plugins, and those of known ones.

The core's own are found without reading metadata, so that `fastdeploy serve` starts at once. Help
reads metadata, once after each installation, and imports no plugin.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

from fastdeploy_core.plugins.core_commands import CORE_COMMANDS, GROUPS
from fastdeploy_core.plugins.known import providers, summaries


def split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The command's name and the words after it. The name is "" or a group's where none follows."""
    words = list(arguments)
    name = ""
    while words and words[0] not in ("-h", "--help", "help") and (not name or name in GROUPS):
        word = words.pop(0)
        name = f"{name}.{word}" if name else word
    return name, words


def find(name: str) -> Callable[[Sequence[str]], int]:
    """The command of that name, imported; ConfigError or a PluginError says why there is none."""
    if name in CORE_COMMANDS:
        module, _, function = CORE_COMMANDS[name][0].partition(":")
        own: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
        return own
    from fastdeploy_core.errors import PluginLoadError
    from fastdeploy_core.plugins.discovery import discover

    inventory = discover()
    if inventory.named("command", name):
        from fastdeploy_core.plugins import drivers

        entry = drivers.find("command", name, inventory)
        # The user asked for this very command: no child process has to try the import first.
        command = drivers.load(entry, preflight=False)
        if not callable(command):
            raise PluginLoadError(
                f"command {name!r} of {entry.origin} failed to load: {entry.target} is "
                f"{type(command).__name__}, not a function of the words after the command"
            )
        return lambda arguments: int(command(arguments) or 0)
    raise _unknown(name, {e.name for e in inventory.of("command")})


def help_text(group: str = "") -> str:
    """What `fastdeploy --help` prints, or `fastdeploy GROUP --help`."""
    from fastdeploy_core.cli.help_cache import cached

    rows = {name: summary for name, (_, summary) in CORE_COMMANDS.items()}
    rows |= {group: f"{text}: fastdeploy {group} --help" for group, text in GROUPS.items()}
    rows |= cached(_installed)
    missing = _table(_missing(rows), group)
    shown = _table(rows, group)
    words = f"fastdeploy {group}".rstrip()
    return (
        f"usage: {words} COMMAND [arguments]\n\ncommands:\n{shown}\n"
        + (f"\nin distributions that are not installed:\n{missing}\n" if missing else "")
        + f"\nEach command explains itself: {words} COMMAND --help."
        + ("" if group else f" {_next_step()}")
    )


def _next_step() -> str:
    """What a user does first: install what computes, then serve."""
    from importlib.util import find_spec  # room `tensor` would import numpy

    if any(find_spec(library) for library in ("paddle", "torch")):
        return "Start with: fastdeploy serve MODEL_FOLDER"
    return (
        "\nNothing here computes yet: no tensor library is installed. Run\n"
        '  pip install "fastdeploy-core[paddle]"    or [torch]; device plugins bring their own\n'
        "  fastdeploy serve MODEL_FOLDER"
    )


def _table(rows: dict[str, str], group: str) -> str:
    return "\n".join(f"  {name:<12} {text}" for name, text in _in_group(rows, group).items())


def _in_group(rows: Mapping[str, str], group: str) -> dict[str, str]:
    """What is right in that group ("": in none), by the name within it."""
    return {
        name.rpartition(".")[2]: value
        for name, value in rows.items()
        if name.rpartition(".")[0] == group
    }


def _installed() -> dict[str, str]:
    """Commands of plugins, with what they do, or why one is not used."""
    import importlib.metadata

    from fastdeploy_core.plugins.discovery import DISABLED, OK, REFUSED, discover

    rows, own = {}, summaries()
    for entry in discover().of("command", usable=False):
        if entry.status in (DISABLED, REFUSED):
            continue
        text = f"not used: {entry.reason}"
        if entry.status == OK:
            summary = own.get(entry.name)
            summary = summary or importlib.metadata.metadata(entry.distribution)["Summary"]
            text = f"{summary or 'no summary'} ({entry.distribution})"
        rows[entry.name] = text
    return rows


def _missing(rows: Mapping[str, str]) -> dict[str, str]:
    """Known commands that have no row, with what they do and what installs them."""
    own, known = summaries(), providers("command")
    return {n: f"{own[n]} (pip install {d})" for n, d in known.items() if n not in rows}


def _unknown(name: str, installed: set[str]) -> Exception:
    import difflib

    from fastdeploy_core.errors import ConfigError, PluginNotFound

    known = providers("command")
    words = name.replace(".", " ")
    if name in known:
        return PluginNotFound(
            f"`fastdeploy {words}` is in the distribution {known[name]}: pip install {known[name]}"
        )
    group = next((g for g in GROUPS if name.startswith(f"{g}.")), "")
    names = dict.fromkeys([*CORE_COMMANDS, *GROUPS, *sorted(installed), *known], "")
    # one of another group may be meant; of two of the same end, that without a group comes last
    ends = {n.rpartition(".")[2]: n for n in sorted(names, key=lambda n: "." not in n)}
    there = list(_in_group(names, group))
    near = difflib.get_close_matches(words.split()[-1], [*there, *ends], n=1)
    hint = f"possible: {', '.join(there)}"
    if near:
        meant = f"{group}.{near[0]}".strip(".") if near[0] in there else ends[near[0]]
        hint = f"did you mean {meant.replace('.', ' ')!r}?"
    return ConfigError(f"unknown command {words!r}; {hint}")
