"""What is installed: entry points of this project's groups, read from metadata, importing nothing.

An Inventory holds every entry with a status and, if it is not usable, the reason. Other modules
choose and load; the command line only prints.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from fastdeploy_core import __version__ as core_version
from fastdeploy_core import envs
from fastdeploy_core.contracts.base import CONTRACT, DISTRIBUTION, HOOK_GROUP, KINDS
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.metadata import read_strictly, tolerate_damage
from fastdeploy_core.plugins.core_commands import CORE_COMMANDS, GROUPS

PREFIX: Final = "fastdeploy."
HOOKS: Final = "hooks"  # kind of the entries of HOOK_GROUP, in tables

OK: Final = "ok"
DISABLED: Final = "disabled"  # left out by FD_PLUGINS or FD_PLUGINS_DISABLED
DUPLICATE: Final = "duplicate"  # another distribution provides the same name
# its group belongs to a contract that this core does not speak
CONTRACT_GROUP: Final = "other contract"
INCOMPATIBLE: Final = "incompatible"  # its metadata requires another core
UNKNOWN_GROUP: Final = "unknown group"
BROKEN: Final = "broken"  # it was to be used and could not be imported; see drivers.without_broken
REFUSED: Final = "refused"  # a command with a name that it cannot have

_KIND_OF_GROUP: Final = {kind.group: kind.name for kind in KINDS.values()} | {HOOK_GROUP: HOOKS}
_VERSIONED_GROUP: Final = re.compile(r"(?P<group>.+)\.v(?P<major>\d+)")


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """One entry point. Its identity is (distribution, version, group, name)."""

    kind: str
    name: str
    group: str
    target: str  # "module:attribute", or "module"
    distribution: str
    version: str
    status: str = OK
    reason: str = ""

    @property
    def is_core(self) -> bool:
        """Whether it belongs to the core's own distribution."""
        return self.distribution == DISTRIBUTION

    @property
    def module(self) -> str:
        """The module part of the target."""
        return self.target.partition(":")[0]

    @property
    def origin(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class Inventory:
    """All entries, sorted by kind, name and distribution, and the problems found reading them."""

    entries: tuple[PluginEntry, ...]
    problems: tuple[str, ...] = ()

    def of(self, kind: str, *, usable: bool = True) -> list[PluginEntry]:
        """Entries of one kind; only those that may be loaded unless `usable` is False."""
        return [e for e in self.entries if e.kind == kind and (e.status == OK or not usable)]

    def named(self, kind: str, name: str) -> list[PluginEntry]:
        """Every entry of that kind and name, with any status."""
        return [e for e in self.entries if e.kind == kind and e.name == name]

    def distributions(self) -> dict[str, str]:
        """Name to version of every distribution with an entry."""
        return {e.distribution: e.version for e in self.entries}


def canonical(name: str) -> str:
    """A distribution name in the normal form that package indexes compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def build_inventory(
    entries: Iterable[PluginEntry],
    *,
    allowed: Iterable[str] | None = None,
    disabled: Iterable[str] = (),
    preferred: Iterable[str] = (),
) -> Inventory:
    """Apply the operator's choice, then find duplicates among the remaining entries."""
    entries = list(entries)
    problems: list[str] = []
    allow = None if allowed is None else {canonical(n) for n in allowed}
    deny = {canonical(n) for n in disabled}
    prefer = {canonical(n) for n in preferred}
    if allow is not None and "all" in allow:
        allow = None
    both = deny & (allow or set())
    if both:
        raise ConfigError(
            f"FD_PLUGINS and FD_PLUGINS_DISABLED both name {', '.join(sorted(both))}; "
            "a plugin is either wanted or not: take it out of one of them"
        )
    known = {canonical(e.distribution) for e in entries}
    for variable, names in (
        ("FD_PLUGINS", allow or set()),
        ("FD_PLUGINS_DISABLED", deny),
        ("FD_PLUGINS_PREFERRED", prefer),
    ):
        missing = sorted(names - known)
        if missing:
            problems.append(
                f"{variable} names {', '.join(missing)}, which is not an installed plugin; "
                f"installed: {', '.join(sorted(known)) or 'none'}"
            )
    if canonical(DISTRIBUTION) in deny:
        problems.append(f"FD_PLUGINS_DISABLED names {DISTRIBUTION}, which always takes part")
    chosen = [_apply_choice(e, allow, deny) for e in entries]
    chosen = _mark_duplicates(chosen, problems, prefer)
    chosen = [_check_command(e) if e.kind == "command" else e for e in chosen]
    for entry in chosen:
        if entry.status not in (OK, DISABLED, DUPLICATE):
            problems.append(f"{entry.kind} {entry.name!r} of {entry.origin}: {entry.reason}")
    order = {kind: i for i, kind in enumerate([*KINDS, HOOKS])}
    chosen.sort(key=lambda e: (order.get(e.kind, 99), e.kind, e.name, e.distribution))
    return Inventory(tuple(chosen), tuple(problems))


def discover(environ: Mapping[str, str] | None = None) -> Inventory:
    """The installed entries under the operator's FD_PLUGINS and FD_PLUGINS_DISABLED."""
    environ = os.environ if environ is None else environ
    return _cached_inventory(
        envs.read("FD_PLUGINS", environ),
        envs.read("FD_PLUGINS_DISABLED", environ),
        envs.read("FD_PLUGINS_PREFERRED", environ),
    )


@functools.lru_cache(maxsize=8)
def _cached_inventory(
    allowed: tuple[str, ...] | None, disabled: tuple[str, ...], preferred: tuple[str, ...]
) -> Inventory:
    return build_inventory(scan(), allowed=allowed, disabled=disabled, preferred=preferred)


@functools.cache
def scan() -> tuple[PluginEntry, ...]:
    """Read all metadata once per process, and set the statuses that need no choice."""
    tolerate_damage()
    found: list[PluginEntry] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            text = read_strictly(distribution, "entry_points.txt")
            # Parsing every METADATA file costs more than the whole time budget; most have no entry
            # of ours.
            if not text or f"[{PREFIX}" not in text.replace(" ", ""):
                continue
            found.extend(_entries_of(distribution, seen))
        except Exception as error:  # a damaged distribution must not hide the others
            where = getattr(distribution, "_path", "unknown place")
            found.append(
                PluginEntry(
                    kind="?",
                    name="?",
                    group="?",
                    target="",
                    distribution=str(where),
                    version="?",
                    status=INCOMPATIBLE,
                    reason=f"its metadata cannot be read: {type(error).__name__}: {error}",
                )
            )
    return tuple(found)


def forget() -> None:
    """Read the metadata again at the next call; for tests that install something."""
    scan.cache_clear()
    _cached_inventory.cache_clear()


def _entries_of(distribution: importlib.metadata.Distribution, seen: set[str]) -> list[PluginEntry]:
    metadata = distribution.metadata  # parsed anew each time it is asked for
    name, version = metadata["Name"], metadata["Version"]
    if canonical(name) in seen:
        return []  # a second copy later on sys.path is shadowed, as for imports
    seen.add(canonical(name))
    if canonical(name) == canonical(DISTRIBUTION):
        name = DISTRIBUTION
    refusal = _core_requirement_refusal(
        metadata.get_all("Requires-Dist") or distribution.requires or []
    )
    entries = []
    for point in distribution.entry_points:
        if not point.group.startswith(PREFIX):
            continue
        kind, status, reason = _classify_group(point.group)
        if status == OK and refusal and name != DISTRIBUTION:
            status, reason = INCOMPATIBLE, refusal
        target = point.value.partition("[")[0].replace(" ", "")
        entry = PluginEntry(kind, point.name, point.group, target, name, version, status, reason)
        entries.append(entry)
    return entries


def _classify_group(group: str) -> tuple[str, str, str]:
    """(kind, status, reason) of a group name. Groups of a later contract carry its major."""
    if group in _KIND_OF_GROUP:
        return _KIND_OF_GROUP[group], OK, ""
    match = _VERSIONED_GROUP.fullmatch(group)
    if match and match["group"] in _KIND_OF_GROUP:
        return (
            _KIND_OF_GROUP[match["group"]],
            CONTRACT_GROUP,
            f"made for contract {match['major']}; this core speaks "
            f"{CONTRACT[0]}.{CONTRACT[1]}: install a core for contract {match['major']}, or an "
            "older release of the plugin",
        )
    known = ", ".join(sorted(_KIND_OF_GROUP))
    return "?", UNKNOWN_GROUP, f"no group {group!r} in this core; there are: {known}"


def _core_requirement_refusal(requirements: Iterable[str]) -> str:
    """Why the plugin's metadata excludes this core; empty if it does not."""
    for text in requirements:
        name = re.split(r"[^\w.-]", text, maxsplit=1)[0]
        if canonical(name) != canonical(DISTRIBUTION):
            continue
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        try:
            specifier = SpecifierSet(text[len(name) :])
        except InvalidSpecifier:  # or it has a marker, whose parser takes 30 ms to import
            from packaging.requirements import InvalidRequirement, Requirement

            try:
                requirement = Requirement(text)
            except InvalidRequirement as error:
                return f"its requirement {text!r} cannot be read: {' '.join(str(error).split())}"
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            specifier = requirement.specifier
        if not specifier.contains(core_version, prereleases=True):
            return (
                f"requires {DISTRIBUTION}{specifier}, this is {core_version}: "
                f"install another release of one of the two"
            )
    return ""


def _apply_choice(entry: PluginEntry, allow: set[str] | None, deny: set[str]) -> PluginEntry:
    if entry.is_core:
        return entry
    name = canonical(entry.distribution)
    if name in deny:
        return replace(entry, status=DISABLED, reason="named by FD_PLUGINS_DISABLED")
    # The list says what serves; a command is what its user calls by name, to look into it, too.
    if allow is not None and name not in allow and entry.kind != "command":
        return replace(entry, status=DISABLED, reason="not named by FD_PLUGINS")
    return entry


def _check_command(entry: PluginEntry) -> PluginEntry:
    """Mark a command that could never be called, with the reason."""
    group = entry.name.rpartition(".")[0]
    if entry.name in CORE_COMMANDS:
        reason = "the core's own command of that name stays in use"
    elif entry.name in GROUPS:
        reason = "the core's own group of that name stays in use"
    elif group not in ("", *GROUPS):
        reason = f"no group of commands {group!r}; there are: {', '.join(GROUPS)}"
    else:
        return entry
    return replace(entry, status=REFUSED, reason=reason) if entry.status == OK else entry


def _mark_duplicates(
    entries: list[PluginEntry], problems: list[str], preferred: Collection[str]
) -> list[PluginEntry]:
    """The same kind and name from two distributions: neither is used, except that the core keeps
    its own names, and that the operator may prefer one distribution."""
    owners: dict[tuple[str, str], list[PluginEntry]] = defaultdict(list)
    for entry in entries:
        shared = entry.kind in KINDS and KINDS[entry.kind].shared
        if entry.status == OK and entry.kind in KINDS and not shared:
            owners[entry.kind, entry.name].append(entry)
    reasons: dict[PluginEntry, str] = {}
    for (kind, name), several in owners.items():
        if len(several) < 2:
            continue
        origins = " and ".join(sorted(e.origin for e in several))
        wanted = [e for e in several if canonical(e.distribution) in preferred]
        if len(wanted) == 1:
            message = f"FD_PLUGINS_PREFERRED names {wanted[0].distribution}, which provides it, too"
            reasons.update({e: message for e in several if e is not wanted[0]})
            continue
        core_has_it = any(e.is_core for e in several)
        rest = (
            "the core's own stays in use; uninstall the other or set FD_PLUGINS_DISABLED"
            if core_has_it
            else "neither is used; uninstall one or name it in FD_PLUGINS_DISABLED"
        )
        message = f"{kind} {name!r} is provided by {origins}; {rest}"
        problems.append(message)
        reasons.update({e: message for e in several if not e.is_core})
    return [replace(e, status=DUPLICATE, reason=reasons[e]) if e in reasons else e for e in entries]
