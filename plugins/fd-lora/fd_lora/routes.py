"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's names: adapters that come and
go while the server runs.

An adapter is loaded by a request of one token that uses it: when the route answers, it is in a slot
of the engine and fits the model. One that is unloaded ends for new requests; those that run go on.
"""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from fastdeploy_core.contracts.base import ApiRoutes
from fastdeploy_core.engine.input import RequestOptions, build_request
from fastdeploy_core.errors import error_named
from fastdeploy_core.serving.http.errors import ApiError
from fastdeploy_core.serving.http.json_body import read_model, tenant_of
from fastdeploy_core.serving.openai.generation import run
from fastdeploy_core.serving.respond import json_response
from fastdeploy_core.serving.state import ServerState
from fastdeploy_core.types import SamplingParams, SequenceExtras

from .files import MAX_NAME_CHARS
from .served import ServedAdapters

MAX_PATH_CHARS = 4096
_PROBE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class LoadBody(BaseModel):
    """Of /v1/load_lora_adapter. load_inplace: the name may belong to another adapter already."""

    model_config = ConfigDict(strict=True, extra="ignore")
    lora_name: str = Field(max_length=MAX_NAME_CHARS)
    lora_path: str = Field(max_length=MAX_PATH_CHARS)
    load_inplace: bool = False


class UnloadBody(BaseModel):
    """Of /v1/unload_lora_adapter."""

    model_config = ConfigDict(strict=True, extra="ignore")
    lora_name: str = Field(max_length=MAX_NAME_CHARS)


def adapter_routes() -> ApiRoutes:
    """Both routes."""
    router = APIRouter()

    @router.post("/v1/load_lora_adapter")
    async def load(http: Request) -> Response:
        state, adapters = _adapters(http)
        body = await read_model(http, LoadBody, state.parsers)
        name, path = body.lora_name, body.lora_path
        extras = await state.threads.run(tenant_of(http), adapters.read, name, path)
        if adapters.get(name, extras) != extras and not body.load_inplace:
            raise ApiError(
                400,
                f"an adapter `{name}` is loaded already, with other files; unload it first, or "
                'send "load_inplace": true',
                param="lora_name",
            )
        await _use(state, extras)
        adapters[name] = extras
        generation = extras.adapter.rpartition("@")[2]
        return json_response({"status": "loaded", "lora_name": name, "generation": generation})

    @router.post("/v1/unload_lora_adapter")
    async def unload(http: Request) -> Response:
        state, adapters = _adapters(http)
        name = (await read_model(http, UnloadBody, state.parsers)).lora_name
        state.check_name(name)
        if adapters.pop(name, None) is None:
            raise ApiError(400, f"`{name}` is the model itself, no adapter", param="lora_name")
        return json_response({"status": "unloaded", "lora_name": name})

    return ApiRoutes(router)


def _adapters(http: Request) -> tuple[ServerState, ServedAdapters]:
    """The server's; ApiError where adapters cannot come and go."""
    state: ServerState = http.app.state.server
    adapters, config = state.adapters, state.config
    if not isinstance(adapters, ServedAdapters):
        raise ApiError(404, "this server serves no adapters; start it with --enable-lora")
    if not adapters.root:
        raise ApiError(
            403, "adapters are not loaded while this server runs; start it with --lora-root FOLDER"
        )
    if config.api_keys and not config.admin_key:
        raise ApiError(
            403, "clients' keys load no adapters; start the server with --admin-key, and send that"
        )
    if config.api_server_count > 1:
        raise ApiError(
            403,
            f"this port has {config.api_server_count} API servers, of which one would know the "
            "adapter; name it with --lora-modules, or start without --api-server-count",
        )
    return state, adapters


async def _use(state: ServerState, extras: SequenceExtras) -> None:
    """Answer one token with the adapter, which brings it to the engine."""
    options = RequestOptions(extras=extras, log_id="load-adapter")
    request = build_request([0], _PROBE, tokenizer=None, limits=state.limits, options=options)
    state.admission.enter(1)
    try:
        async with aclosing(run(state, request)) as outputs:
            async for output in outputs:
                if output.error is not None:
                    raise error_named(output.error_type, output.error)
    finally:
        state.admission.leave(1)
