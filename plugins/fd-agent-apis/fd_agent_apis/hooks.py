"""Adds the routes to the API server. Light: it imports nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.hookspecs import hookimpl

if TYPE_CHECKING:
    from fastdeploy_core.contracts.base import ApiRoutes


@hookimpl
def fd_api_routes_at_root() -> list[ApiRoutes]:
    """/v1/responses; /v1/messages and /v1/messages/count_tokens."""
    from .routes import messages_routes, responses_routes

    return [responses_routes(), messages_routes()]
