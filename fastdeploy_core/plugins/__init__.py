"""Finding and choosing plugins: discovery, safe loading, negotiation, kernel tables. No domain.

Importing this package reads no metadata and loads no plugin; each function below imports what it
needs, so that the command line stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .discovery import Inventory

__all__ = ["lookup", "names"]


def lookup(kind: str, name: str, *, inventory: Inventory | None = None) -> Any:
    """The driver class of that kind and name; PluginNotFound says what there is.

    For the kinds chosen by name alone (parsers, logits processors, grammars, models). Names come
    from the kind's entry-point group and, after those, from its fd_register_... hook.
    """
    from .drivers import lookup as find_and_load

    return find_and_load(kind, name, inventory=inventory)


def names(kind: str, *, inventory: Inventory | None = None) -> list[str]:
    """Every usable name of a kind, sorted; imports no driver."""
    from .drivers import available

    return available(kind, inventory=inventory)
