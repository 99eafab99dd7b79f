"""`fastdeploy plugins show NAME`: what one plugin provides, as it says in a child process."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

from fastdeploy_core import envs
from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.errors import PluginNotFound
from fastdeploy_core.plugins.discovery import OK, Inventory, PluginEntry, canonical, discover
from fastdeploy_core.plugins.preflight import Job
from fastdeploy_core.plugins.preflight import run as preflight

from .facts import REPORT


def main(argv: Sequence[str]) -> int:
    """Print one plugin; exit code 1 when something of it cannot be imported."""
    arguments = _parser().parse_args(argv)
    inventory = discover()
    entries = _entries_named(inventory, arguments.name)
    limit_s = envs.read("FD_PLUGIN_DRIVER_TIMEOUT_S")
    usable = [e for e in entries if e.status == OK]
    outcomes = dict(
        zip(
            usable,
            preflight([Job(e.target, limit_s, report=REPORT, group=e.name) for e in usable]),
            strict=True,
        )
    )
    data: list[dict[str, Any]] = []
    for distribution in sorted({e.distribution for e in entries}):
        own = [e for e in entries if e.distribution == distribution]
        drivers: list[dict[str, Any]] = []
        for entry in own:
            outcome = outcomes.get(entry)
            error = outcome.error if outcome else f"{entry.status}: {entry.reason}"
            drivers.append(
                {
                    "name": entry.name,
                    "kind": entry.kind,
                    "target": entry.target,
                    "error": error,
                    **(outcome.facts if outcome else {}),
                }
            )
        data.append(_metadata(distribution) | {"provides": drivers})
    if arguments.json:
        print(json.dumps({"distributions": data}, indent=2, default=str))
    else:
        for item in data:
            _print(item)
    return 1 if any(d["error"] for item in data for d in item["provides"]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fastdeploy plugins show", description="Drivers, hooks and capabilities of one plugin."
    )
    parser.add_argument("name", help="a distribution, or the name of a driver")
    parser.add_argument("--json", action="store_true", help="the stable form for programs")
    return parser


def _entries_named(inventory: Inventory, name: str) -> list[PluginEntry]:
    entries = [e for e in inventory.entries if canonical(e.distribution) == canonical(name)]
    entries = entries or [e for e in inventory.entries if e.name == name]
    if not entries:
        installed = ", ".join(sorted(inventory.distributions())) or "none"
        raise PluginNotFound(
            f"no plugin {name!r}; installed distributions: {installed}; "
            "a driver's name works too: fastdeploy plugins list"
        )
    return entries


def _metadata(distribution: str) -> dict[str, Any]:
    try:
        metadata = importlib.metadata.metadata(distribution)
    except importlib.metadata.PackageNotFoundError:
        return {"distribution": distribution, "version": "?", "summary": "", "links": []}
    return {
        "distribution": distribution,
        "version": metadata["Version"],
        "summary": metadata["Summary"] or "",
        "links": metadata.get_all("Project-URL") or [],
        "requires": importlib.metadata.requires(distribution) or [],
    }


def _print(item: dict[str, Any]) -> None:
    print(f"{item['distribution']} {item['version']}  {item['summary']}")
    for link in item["links"]:
        print(f"  {link.replace(', ', ': ', 1)}")
    for driver in item["provides"]:
        print(f"\n  {driver['kind']} {driver['name']}  ({driver['target']})")
        if driver["error"]:
            print(f"    cannot be used: {driver['error']}")
        for key, value in driver.items():
            if key in ("name", "kind", "target", "error"):
                continue
            print(f"    {key}: {_shown(key, value)}")
    print()


def _shown(key: str, value: Any) -> str:
    if key == "contract":
        return ".".join(map(str, value))
    if isinstance(value, dict):
        return "".join(f"\n      {k}: {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
