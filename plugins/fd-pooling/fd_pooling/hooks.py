"""Adds the routes to the API server. Light: it imports nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.hookspecs import hookimpl

if TYPE_CHECKING:
    from fastdeploy_core.contracts.base import ApiRoutes


@hookimpl
def fd_api_routes_at_root() -> list[ApiRoutes]:
    """/v1/embeddings, /pooling, /classify, /score, /rerank, /v1/reward and their other names."""
    from .routes import pooling_routes

    return [pooling_routes()]
