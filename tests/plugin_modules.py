"""Helpers for tests of the plugin room: entries without installation, modules written on the
spot."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdeploy_core.contracts.base import DISTRIBUTION, HOOK_GROUP, KINDS
from fastdeploy_core.plugins.discovery import HOOKS, PluginEntry


def entry(
    kind: str,
    name: str,
    target: str,
    distribution: str = "fd-test",
    version: str = "1.0",
    **more: str,
) -> PluginEntry:
    """An entry as discovery would find it."""
    group = HOOK_GROUP if kind == HOOKS else KINDS[kind].group
    return PluginEntry(kind, name, group, target, distribution, version, **more)


def core_entry(kind: str, name: str, target: str) -> PluginEntry:
    """The same of the core's own distribution."""
    return entry(kind, name, target, DISTRIBUTION)


def module_writer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """write(name, source) -> module name, importable here and in child processes."""
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, source: str) -> str:
        (folder / f"{name}.py").write_text(textwrap.dedent(source), "utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write
