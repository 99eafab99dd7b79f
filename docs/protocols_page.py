"""The page of Protocols: what the core calls, for every kind of driver."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from fastdeploy_core.contracts.base import CONTRACT, KINDS, Kind

HEAD = """# Protocols

What each kind of driver implements and what it is asked, in contract {major}.{minor}.
[What a plugin may rely on](contract.md) says how long that stays. A driver of a versioned kind also
has `name` and `contract = {contract}`. What the kit checks: `fastdeploy plugins check NAME -v`.
"""


def protocols(table: Callable[..., str]) -> str:
    """The page."""
    major, minor = CONTRACT
    parts = [HEAD.format(major=major, minor=minor, contract=CONTRACT)]
    rows = [
        (f"[{k.name}](#{k.name})", f"`{k.group}`", k.summary, "yes" if k.versioned else "no")
        for k in KINDS.values()
        if k.protocol
    ]
    parts.append(table(("kind", "entry-point group", "what it is for", "versioned"), rows))
    for kind in KINDS.values():
        if kind.protocol:
            parts += _kind(kind, table)
    return "\n".join(parts)


def _kind(kind: Kind, table: Callable[..., str]) -> Iterator[str]:
    module_name, _, name = kind.protocol.partition(":")
    module = importlib.import_module(module_name)
    yield f"\n## {kind.name}\n\n`{kind.protocol.replace(':', '.')}`\n"
    yield from _protocol(getattr(module, name), table)
    if kind.protocol.startswith(f"{module_name.rpartition('.')[0]}.small"):
        return  # its records belong to several kinds
    for record in vars(module).values():
        is_own = inspect.isclass(record) and record.__module__ == module_name
        if is_own and dataclasses.is_dataclass(record) and not record.__name__.startswith("_"):
            yield f"\n### {record.__name__}\n\n{inspect.getdoc(record)}\n"
            rows = [(f"`{f.name}`", f"`{f.type}`", _default(f)) for f in dataclasses.fields(record)]
            yield table(("field", "type", "default"), rows)


def _protocol(protocol: Any, table: Callable[..., str]) -> Iterator[str]:
    yield inspect.getdoc(protocol) or ""
    members = {
        n: v
        for n, v in vars(protocol).items()
        if (inspect.isfunction(v) or isinstance(v, property))
        and (not n.startswith("_") or n == "__call__")
    }
    attributes = {
        n: t for n, t in inspect.get_annotations(protocol).items() if not n.startswith("_")
    }
    rows = [(f"`{n}`", f"`{t}`") for n, t in attributes.items()]
    if rows:
        yield "\n" + table(("attribute", "type"), rows)
    calls = []
    for name, member in members.items():
        function = member.fget if isinstance(member, property) else member
        signature = str(inspect.signature(function)).replace("(self, ", "(").replace("(self)", "()")
        calls.append((f"`{name}{signature}`", " ".join((inspect.getdoc(function) or "").split())))
    if calls:
        yield "\n" + table(("method", "meaning"), calls)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "" if field.default_factory is dataclasses.MISSING else "empty"
