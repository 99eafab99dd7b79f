"""Which distribution to install for a driver or command that is missing: known_plugins.json."""

from __future__ import annotations

import json
from pathlib import Path


def providers(kind: str) -> dict[str, str]:
    """Name to distribution, of one kind."""
    text = Path(__file__).with_name("known_plugins.json").read_text("utf-8")
    found: dict[str, str] = json.loads(text).get(kind, {})
    return found
