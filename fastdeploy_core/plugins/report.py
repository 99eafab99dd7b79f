"""Tables, and what is installed as one and as data for JSON.

Used by the command line and the server's plugin page. Imports no plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .discovery import Inventory, PluginEntry

COLUMNS = ("name", "kind", "distribution", "version", "status")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Left-aligned columns, two spaces apart; the last column may be long."""
    cells = [[str(c) for c in columns], *([str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def inventory_table(entries: Sequence[PluginEntry]) -> str:
    """`plugins list` as text."""
    return table(COLUMNS, [[getattr(entry, name) for name in COLUMNS] for entry in entries])


def inventory_data(inventory: Inventory, entries: Sequence[PluginEntry]) -> dict[str, Any]:
    """`plugins list --json`, also the body of the server's plugin page. A stable form."""
    names = (*COLUMNS[:-1], "group", "target", *COLUMNS[-1:], "reason")
    plugins = [{name: getattr(entry, name) for name in names} for entry in entries]
    return {"plugins": plugins, "problems": list(inventory.problems)}
