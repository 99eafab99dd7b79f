"""Adds the routes of rollouts. Light: it imports nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.hookspecs import hookimpl

if TYPE_CHECKING:
    from fastdeploy_core.contracts.base import ApiRoutes


@hookimpl
def fd_api_routes_at_root() -> list[ApiRoutes]:
    """/pause, /resume, /sleep, /wake_up, /update_weights and what they came to."""
    from .routes import rollout_routes

    return [rollout_routes()]
