"""Routes that plugins add: asking for them, mounting them, and what to install for missing ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.routing import Match

from fastdeploy_core.contracts.base import DISTRIBUTION, ApiRoutes, ErrorBody
from fastdeploy_core.errors import PluginConflict
from fastdeploy_core.plugins.known import providers
from fastdeploy_core.plugins.manager import hook_manager
from fastdeploy_core.plugins.resolved import ResolvedPlugins


@dataclass(frozen=True, slots=True)
class PluginRoutes:
    """Routes of one distribution; an empty prefix puts them at paths of their own."""

    distribution: str
    prefix: str
    routes: ApiRoutes


def plugin_routes(resolved: ResolvedPlugins | None) -> list[PluginRoutes]:
    """The answers to both hooks about routes."""
    hooks = hook_manager(resolved)
    found = [
        PluginRoutes(name := answer.plugin.distribution, f"/plugins/{name}", ApiRoutes(router))
        for answer in hooks.ask("fd_api_routes")
        for router in answer.value
    ]
    for answer in hooks.ask("fd_api_routes_at_root"):
        found += [PluginRoutes(answer.plugin.distribution, "", routes) for routes in answer.value]
    return found


def mount(app: FastAPI, plugins: Sequence[PluginRoutes]) -> dict[str, ErrorBody]:
    """Add the routes; returns how errors on which path are written. PluginConflict for a route that
    is there already."""
    owners = [(DISTRIBUTION, route) for route in app.routes]
    error_bodies: dict[str, ErrorBody] = {}
    for plugin in plugins:
        name = plugin.distribution
        for route in plugin.routes.router.routes:
            path = plugin.prefix + getattr(route, "path", "")
            for method in sorted(getattr(route, "methods", None) or ()):
                call = {"type": "http", "path": path, "method": method}
                for owner, other in owners:
                    if owner != name and other.matches(call)[0] is Match.FULL:
                        raise PluginConflict(
                            f"{name} adds the route {method} {path}, which {owner} serves; "
                            f"run: pip uninstall {name}"
                        )
            if plugin.routes.error_body is not None:
                error_bodies[path] = plugin.routes.error_body
        num_routes = len(app.routes)
        app.include_router(plugin.routes.router, prefix=plugin.prefix)
        owners += [(name, route) for route in app.routes[num_routes:]]
    return error_bodies


def how_to_get(method: str, path: str) -> str | None:
    """What to install for a route that is not there, if a known distribution has it."""
    provider = providers("route").get(f"{method} {path}")
    return provider and (
        f"{method} {path} is served by the distribution {provider}, which is not installed here; "
        f"run: pip install {provider}, and start the server again"
    )
