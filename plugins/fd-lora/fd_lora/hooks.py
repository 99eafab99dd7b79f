"""Adds the routes that load and unload adapters. Light: it imports nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.hookspecs import hookimpl

if TYPE_CHECKING:
    from fastdeploy_core.contracts.base import ApiRoutes


@hookimpl
def fd_api_routes_at_root() -> list[ApiRoutes]:
    """/v1/load_lora_adapter and /v1/unload_lora_adapter."""
    from .routes import adapter_routes

    return [adapter_routes()]
