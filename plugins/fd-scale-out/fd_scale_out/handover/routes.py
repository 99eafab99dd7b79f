"""GET and POST /kv_handover: what routers use an instance for, how others reach it, and changing
the former while it serves."""

from __future__ import annotations

import asyncio
import hmac
from typing import Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from fastdeploy_core.contracts.base import ApiRoutes
from fastdeploy_core.serving.http.errors import ApiError
from fastdeploy_core.serving.http.json_body import read_model
from fastdeploy_core.serving.respond import json_response
from fastdeploy_core.serving.state import ServerState
from fastdeploy_core.types import InstanceRole
from fastdeploy_core.types.engine import EngineStats

from .ticket import shared_secret

SECRET_HEADER: Final = "x-kv-secret"  # noqa: S105, its name
SWITCH_S: Final = 120.0  # longer than handovers under way may take (--kv-transport-timeout)
LOOK_S: Final = 0.05


class RoleRequest(BaseModel):
    """The body of POST /kv_handover."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["mixed", "prefill", "decode"]


def routes() -> ApiRoutes:
    """Both routes."""
    router = APIRouter()

    @router.get("/kv_handover")
    async def show(http: Request) -> Response:
        return json_response(_shown(await _state(http).engine.stats()))

    @router.post("/kv_handover")
    async def switch(http: Request) -> Response:
        state = _state(http)
        body = await read_model(http, RoleRequest, state.parsers)
        stats = await state.engine.stats()
        if not stats.kv_role:
            raise ApiError(
                409,
                "this server hands nothing over, or changes its role just now; it has one with "
                "--splitwise-role or --kv-transport",
            )
        given = http.headers.get(SECRET_HEADER, "").encode("latin-1")
        if not hmac.compare_digest(given, shared_secret()):
            raise ApiError(
                403,
                "changing the role takes the secret that instances share: send it in the header "
                "X-KV-Secret (FD_KV_SECRET, or the file kv-secret in FD_CACHE_DIR)",
            )
        role = InstanceRole(body.role)
        state.engine.set_role(role)
        try:
            async with asyncio.timeout(SWITCH_S):
                while (stats := await state.engine.stats()).kv_role != role.value:
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            message = f"handovers under way have not ended within {SWITCH_S:g} s; it goes on"
            raise ApiError(504, message) from None
        return json_response(_shown(stats))

    return ApiRoutes(router)


def _shown(stats: EngineStats) -> dict[str, str]:
    return {"role": stats.kv_role, "ticket": stats.kv_ticket}


def _state(http: Request) -> ServerState:
    state: ServerState = http.app.state.server
    return state
