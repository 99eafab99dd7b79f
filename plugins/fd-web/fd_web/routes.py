"""GET / and /ui/NAME: the page, the same for everybody, so that it needs no key; it asks for one.
GET /docs: the API, open like the page, since it says nothing of this server's model or users.
GET /state, for a key's owner: what the server serves and why each plugin was chosen.

The policy lets the page load and ask its own server alone, run its own scripts alone, and be framed
by nobody: whatever a model writes into it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy_core import __version__
from fastdeploy_core.contracts.base import ApiRoutes
from fastdeploy_core.errors import FastDeployError
from fastdeploy_core.serving.http.errors import ApiError
from fastdeploy_core.serving.respond import json_response
from fastdeploy_core.serving.state import ServerState

from .api_page import api_page

PAGE: Final = Path(__file__).with_name("page")
TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> ApiRoutes:
    """All of them. Files are read once."""
    files = {path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in TYPES}
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index() -> Response:
        return _file("index.html", files["index.html"], "no-cache")

    @router.api_route("/ui/{name}", methods=["GET", "HEAD"])
    async def asset(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"the page has no file {name[:80]!r}")
        kept = "-" in name  # the build puts a digest after the dash
        return _file(name, files[name], f"max-age={31_536_000 if kept else 3600}")

    @router.api_route("/docs", methods=["GET", "HEAD"])
    async def docs(http: Request) -> Response:
        return _file("docs.html", api_page(http.app.openapi()), "no-cache")

    @router.get("/state")
    async def state(http: Request) -> Response:
        return json_response(await _state(http))

    return ApiRoutes(router)


def _file(name: str, content: bytes, cache: str) -> Response:
    headers = {**_HEADERS, "cache-control": cache}
    return Response(content, headers=headers, media_type=TYPES[Path(name).suffix])


async def _state(http: Request) -> dict[str, Any]:
    server: ServerState = http.app.state.server
    info, health = server.engine.info, server.engine.health()
    draining = health.draining or server.occupancy.table.is_draining
    state = "draining" if draining else "ready" if health.ready else "down"
    with suppress(FastDeployError):  # an engine that is down says nothing
        control = (await server.engine.stats()).control  # fd-rollout's
        found = json.loads(control)["state"] if control else "running"
        state = state if found == "running" else found
    return {
        "version": __version__,
        "model": server.model_names[0],
        "models": server.model_names,
        "architecture": info.architecture,
        "context": info.max_model_len,
        "device": info.device,
        "dtype": info.dtype,
        "health": state,
        "reason": health.reason,
        "decisions": _decisions(http.app.state.decisions),
        "report": info.report,
    }


def _decisions(lines: list[str]) -> list[dict[str, str]]:
    """Lines of ResolvedPlugins.report, as "kind name: reason"."""
    found = []
    for line in lines:
        choice, _, reason = line.partition(": ")
        found.append({"choice": choice, "reason": reason})
    return found
