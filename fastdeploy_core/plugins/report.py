"""Tables of what is installed and why something was chosen, as text and as data for JSON.

Used by the command line, the start-up log and the server's plugin page. Imports no plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .discovery import Inventory, PluginEntry

if TYPE_CHECKING:
    from .negotiate import Decision

INVENTORY_COLUMNS = ("name", "kind", "distribution", "version", "status")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Left-aligned columns, two spaces apart; the last column may be long."""
    cells = [[str(c) for c in columns], *([str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def inventory_table(entries: Sequence[PluginEntry]) -> str:
    """`plugins list` as text."""
    return table(
        INVENTORY_COLUMNS,
        [(e.name, e.kind, e.distribution, e.version, e.status) for e in entries],
    )


def inventory_data(inventory: Inventory, entries: Sequence[PluginEntry]) -> dict[str, Any]:
    """`plugins list --json`, also the body of the server's plugin page. A stable form."""
    return {
        "plugins": [
            {
                "name": e.name,
                "kind": e.kind,
                "distribution": e.distribution,
                "version": e.version,
                "group": e.group,
                "target": e.target,
                "status": e.status,
                "reason": e.reason,
            }
            for e in entries
        ],
        "problems": list(inventory.problems),
    }


def decision_table(decision: Decision) -> str:
    """One question with every candidate's answer."""
    rows = [
        (
            "->" if c.name == decision.winner else "",
            c.name,
            c.distribution,
            "accept" if c.accepted else "decline",
            c.score if c.accepted else "",
            c.reason,
        )
        for c in decision.candidates
    ]
    winner = (
        f"winner: {decision.winner} ({decision.why})"
        if decision.winner
        else (f"no winner: {decision.why}")
    )
    body = table(("", "candidate", "distribution", "answer", "score", "reason"), rows)
    return f"{decision.kind}: {decision.question}\n{body}\n{winner}"


def decision_data(decision: Decision) -> dict[str, Any]:
    """The table's content as plain data."""
    return {
        "kind": decision.kind,
        "question": decision.question,
        "winner": decision.winner,
        "why": decision.why,
        "candidates": [
            {
                "name": c.name,
                "distribution": c.distribution,
                "accepted": c.accepted,
                "score": c.score,
                "reason": c.reason,
            }
            for c in decision.candidates
        ],
    }
