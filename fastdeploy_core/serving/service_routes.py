"""Routes about the server itself: health, load, version, metrics, plugins.

Health routes answer 200 or 503 only: /health/live: this process answers; /health/ready: requests
may come; /health (and /ping): the engine makes progress. /drain, for operators: no new requests are
taken any more, by no API server of this port; running ones end, and the process goes on.
"""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from fastdeploy_core import __version__
from fastdeploy_core.errors import FastDeployError
from fastdeploy_core.serving.front.probes import answer_probe
from fastdeploy_core.serving.http.middleware import DRAIN_PATH, OPEN_PATHS

from .respond import json_response
from .state import ServerState

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 2.0


def service_router(state: ServerState) -> APIRouter:
    """Routes of one app."""
    router = APIRouter()

    async def probe(http: Request) -> Response:
        table = state.occupancy.table
        status, body = answer_probe(http.scope["path"], state.engine.health(), table)
        return json_response(body, status)

    for path in sorted(OPEN_PATHS):
        router.add_api_route(path, probe, methods=["GET"], operation_id=path.strip("/"))
    router.add_api_route("/ping", probe, methods=["POST"], operation_id="ping_by_post")

    if state.config.admin_key:

        @router.post(DRAIN_PATH)
        async def drain() -> Response:
            state.occupancy.table.drain()
            state.engine.take_no_more()
            logger.info("/drain: no new requests are taken; %d run", state.admission.total)
            return json_response({"status": "draining", "server_load": state.admission.total})

    @router.get("/load")
    async def load() -> Response:
        return json_response({"server_load": state.admission.total})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        stats = None
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats = await state.engine.stats()
        except (FastDeployError, TimeoutError):
            pass  # metrics are served without a healthy engine; engine_ready shows that
        text = state.metrics.render(stats, state.engine.health(), state.engine.info)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @router.get("/plugins")
    async def plugins() -> Response:
        return json_response(await state.threads.run("", _plugins))

    return router


def _plugins() -> object:
    """The data of `fastdeploy plugins list --json`."""
    from fastdeploy_core.plugins.discovery import discover
    from fastdeploy_core.plugins.report import inventory_data

    inventory = discover()
    return inventory_data(inventory, inventory.entries)
