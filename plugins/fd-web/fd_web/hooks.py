"""Adds the page. Light: it imports nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.hookspecs import hookimpl

if TYPE_CHECKING:
    from fastdeploy_core.contracts.base import ApiRoutes


@hookimpl
def fd_api_routes_at_root() -> list[ApiRoutes]:
    """/, /ui/NAME, /docs and /state."""
    from .routes import page_routes

    return [page_routes()]
