"""Routes of rollouts, with vLLM's names and those of FastDeploy 2.x: POST /pause, /resume, /sleep,
/wake_up, /update_weights, /reset_prefix_cache; GET /is_paused, /is_sleeping, /weight_info.

Those that change something are for the operator's key (--admin-key). Options are taken from the
query or from a JSON body. An answer comes when the thing is done.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from fastdeploy_core.contracts.base import ApiRoutes
from fastdeploy_core.serving.http.errors import ApiError
from fastdeploy_core.serving.http.json_body import read_model
from fastdeploy_core.serving.respond import json_response
from fastdeploy_core.serving.state import ServerState

LOOK_S = 0.02
MAX_CHARS = 4096

Mode = Literal["abort", "wait", "keep"]
Tag = Literal["weights", "weight", "kv_cache"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class PauseBody(_Body):
    """Of /pause. clear_cache: cached prefixes are forgotten, too."""

    mode: Mode = "abort"
    clear_cache: bool = True


class SleepBody(_Body):
    """Of /sleep. mode: for requests that run."""

    level: Literal[0, 1, 2] = 1
    mode: Mode = "abort"
    tags: list[Tag] | None = None


class WakeBody(_Body):
    """Of /wake_up."""

    tags: list[Tag] | None = None


class UpdateBody(_Body):
    """Of /update_weights. source: a driver of fd_rollout.weight_sources; `path` is short for source
    "folder" with options {"path": ...}. mode: for requests that run, where nobody paused before."""

    source: str = Field(default="folder", max_length=MAX_CHARS)
    options: dict[str, Any] = {}
    path: str | None = Field(default=None, max_length=MAX_CHARS)
    version: str = Field(default="", max_length=128)
    mode: Mode = "wait"


def rollout_routes() -> ApiRoutes:
    """All of them."""
    router = APIRouter()
    changes: dict[str, tuple[str, type[_Body]]] = {
        "/pause": ("pause", PauseBody),
        "/v1/pause": ("pause", PauseBody),
        "/resume": ("resume", _Body),
        "/v1/resume": ("resume", _Body),
        "/sleep": ("sleep", SleepBody),
        "/v1/sleep": ("sleep", SleepBody),
        "/wake_up": ("wake_up", WakeBody),
        "/v1/wakeup": ("wake_up", WakeBody),
        "/update_weights": ("update_weights", UpdateBody),
        "/v1/update_weights": ("update_weights", UpdateBody),
        "/reset_prefix_cache": ("reset_prefix_cache", _Body),
    }
    for path, (name, body) in changes.items():
        router.add_api_route(path, _change(name, body), methods=["POST"], name=path.strip("/"))

    async def is_paused(http: Request) -> Response:
        state = (await _state(_server(http)))["state"]
        return json_response({"is_paused": state != "running", "state": state})

    for path in ("/is_paused", "/v1/is_paused"):
        router.add_api_route(path, is_paused, methods=["GET"], name=path.strip("/"))

    @router.get("/is_sleeping")
    async def is_sleeping(http: Request) -> Response:
        state = await _state(_server(http))
        return json_response({"is_sleeping": bool(state["asleep"]), "asleep": state["asleep"]})

    @router.get("/weight_info")
    async def weight_info(http: Request) -> Response:
        state = await _state(_server(http))
        return json_response({name: state[name] for name in ("weight_version", "num_updates")})

    return ApiRoutes(router)


def _change(name: str, kind: type[_Body]) -> Any:
    async def route(http: Request) -> Response:
        state = _server(http)
        if not state.config.admin_key:
            raise ApiError(
                403, f"{http.url.path} is for operators; start the server with --admin-key"
            )
        asked = (await _options(http, kind)).model_dump()
        if asked.get("path") is not None:
            asked["options"] = {**asked["options"], "path": asked["path"]}
        asked.pop("path", None)
        return json_response(await _ask(state, {"do": name, **asked}))

    return route


async def _options(http: Request, kind: type[_Body]) -> _Body:
    """Of the query and of the body, which wins."""
    query: dict[str, Any] = dict(http.query_params)
    if "tags" in query:
        query["tags"] = [t for text in http.query_params.getlist("tags") for t in text.split(",")]
    if "level" in query and query["level"].isdigit():
        query["level"] = int(query["level"])
    unknown, given = query.keys() - kind.model_fields.keys(), dict[str, Any]()
    if await http.body():
        body = await read_model(http, kind, _server(http).parsers)
        given = body.model_dump(exclude_unset=True)
    http.state.ignored_fields = sorted({*getattr(http.state, "ignored_fields", ()), *unknown})
    return kind.model_validate({**query, **given})


def _server(http: Request) -> ServerState:
    state: ServerState = http.app.state.server
    return state


async def _state(state: ServerState) -> dict[str, Any]:
    """What the engine's part says; ApiError where it has none."""
    text = (await state.engine.stats()).control
    if not text:
        raise ApiError(404, "this engine cannot be paused; start it with --enable-rollout")
    found: dict[str, Any] = json.loads(text)
    return found


async def _ask(state: ServerState, action: dict[str, Any]) -> dict[str, Any]:
    """Have the engine do it, and wait for that."""
    epoch, ident = (await _state(state))["epoch"], uuid4().hex
    state.engine.control({"id": ident, **action})
    while True:
        now = await _state(state)
        if now["epoch"] != epoch:
            raise ApiError(503, f"the engine ended during {action['do']}, and was started again")
        answer: dict[str, Any] | None = now["done"].get(ident)
        if answer is None:
            await asyncio.sleep(LOOK_S)
            continue
        is_running = now["state"] == "running"  # else /health/ready is 503
        state.occupancy.table.pause(-1 if is_running else state.engine.health().num_restarts)
        if "error" in answer:
            raise ApiError(answer["status"], answer["error"])
        return answer
