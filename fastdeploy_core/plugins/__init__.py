"""Finds and chooses plugins: discovery, safe loading, negotiation, kernel tables. No domain
knowledge.

Importing this package reads no metadata and loads no plugin; each function imports what it needs,
so the command line starts quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .discovery import Inventory

__all__ = ["lookup", "names"]


def lookup(kind: str, name: str, *, inventory: Inventory | None = None) -> Any:
    """The driver class of that kind and name; PluginNotFound lists what there is.

    For kinds that are chosen by name alone (parsers, logits processors, models). Names
    come from the kind's entry-point group, then from its fd_register_... hook.
    """
    from .drivers import lookup as find_and_load

    return find_and_load(kind, name, inventory=inventory)


def names(kind: str, *, inventory: Inventory | None = None) -> list[str]:
    """Every usable name of a kind, sorted; imports no driver."""
    from .drivers import available

    return available(kind, inventory=inventory)
