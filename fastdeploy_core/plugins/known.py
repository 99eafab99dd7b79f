"""The distribution to install for a missing driver or command: known_plugins.json."""

from __future__ import annotations

import json
from pathlib import Path


def providers(kind: str) -> dict[str, str]:
    """Name to distribution, of one kind."""
    return _section(kind)


def summaries() -> dict[str, str]:
    """Command to summary, of the same commands as `providers("command")`."""
    return _section("command summary")


def _section(name: str) -> dict[str, str]:
    text = Path(__file__).with_name("known_plugins.json").read_text("utf-8")
    found: dict[str, str] = json.loads(text).get(name, {})
    return found
