"""POST /v1/responses and /v1/messages, and below them the routes that count tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel
from starlette.responses import Response

from fastdeploy_core.contracts.base import ApiRoutes
from fastdeploy_core.serving.http.errors import ApiError
from fastdeploy_core.serving.http.json_body import BIG_BODY_BYTES, read_model, tenant_of
from fastdeploy_core.serving.openai.chat import ChatJob
from fastdeploy_core.serving.openai.routes import call_of
from fastdeploy_core.serving.openai.schemas.chat import ChatCompletionRequest
from fastdeploy_core.serving.openai.usage import Call
from fastdeploy_core.serving.respond import answer, json_response
from fastdeploy_core.serving.state import ServerState

from . import messages_request, responses_request
from .checks import AgentBody, named_as
from .conversation import Conversation, placed, shows_system_in_place
from .job import AgentJob, frames
from .messages_answer import MessageWriter, error_body
from .messages_request import CountRequest, MessagesRequest
from .responses_answer import ResponseWriter
from .responses_request import ResponsesRequest
from .tools import Tools

Body = TypeVar("Body", bound=AgentBody)
_METHODS = ["GET", "POST", "DELETE"]
Reader = Callable[[Body, bool, bool], tuple[dict[str, Any], Conversation, Tools]]


def responses_routes() -> ApiRoutes:
    """OpenAI's. Its errors have the same shape as those of chat."""
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=_body_of(ResponsesRequest))
    async def responses(http: Request) -> Response:
        state = _state(http)
        body = await read_model(http, ResponsesRequest, state.parsers)
        call, chat, tools = await _chat(http, body, responses_request.read, responses_request.NAMES)
        writer = ResponseWriter(body, tools, call.id, state.check_model(body.model))
        return await answer(http, state, AgentJob(state, call.tenant, chat, writer), frames)

    @router.post("/v1/responses/input_tokens", openapi_extra=_body_of(ResponsesRequest))
    async def input_tokens(http: Request) -> Response:
        body = await read_model(http, ResponsesRequest, _state(http).parsers)
        count = await _count(http, body, responses_request.read, responses_request.NAMES)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    @router.api_route("/v1/responses/{path:path}", methods=_METHODS, include_in_schema=False)
    async def stored(path: str) -> Response:
        if not path:
            raise HTTPException(404)  # the app knows which route is meant
        raise ApiError(404, f"there is no response {path!r:.80}: {responses_request.STATELESS}")

    return ApiRoutes(router)


def messages_routes() -> ApiRoutes:
    """Anthropic's."""
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=_body_of(MessagesRequest))
    async def messages(http: Request) -> Response:
        state = _state(http)
        body = await read_model(http, MessagesRequest, state.parsers)
        call, chat, tools = await _chat(http, body, messages_request.read, messages_request.NAMES)
        model = state.check_model(body.model)
        writer = MessageWriter(tools, call.id, model, body.max_tokens)
        return await answer(http, state, AgentJob(state, call.tenant, chat, writer), frames)

    @router.post("/v1/messages/count_tokens", openapi_extra=_body_of(CountRequest))
    async def count_tokens(http: Request) -> Response:
        body = await read_model(http, CountRequest, _state(http).parsers)
        count = await _count(http, body, messages_request.read, messages_request.NAMES)
        return json_response({"input_tokens": count})

    return ApiRoutes(router, error_body)


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI entry of a body that read_model parses, since FastAPI does not see it."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _state(http: Request) -> ServerState:
    state: ServerState = http.app.state.server
    return state


async def _count(http: Request, body: Body, read: Reader[Body], names: Mapping[str, str]) -> int:
    """Neither the engine nor a queue is asked: agents send dozens of these at once."""
    state = _state(http)
    _, chat, _ = await _chat(http, body, read, names)
    with named_as(names):
        threads = state.threads if state.media is None else state.media_threads
        return len(await threads.run(tenant_of(http), chat.token_ids))


async def _chat(
    http: Request,
    body: Body,
    read: Reader[Body],
    names: Mapping[str, str],
) -> tuple[Call, ChatJob, Tools]:
    """The chat job that a body asks for. A large one is read beside the event loop, as it was
    parsed."""
    state = _state(http)

    def make() -> tuple[Call, ChatJob, Tools]:
        sees = state.media is not None and "image" in state.media.kinds
        fields, conversation, tools = read(body, state.reasoning_parser is not None, sees)
        if conversation.ignored:
            known = getattr(http.state, "ignored_fields", [])
            http.state.ignored_fields = [*known, *conversation.ignored]
        messages = placed(conversation.messages, shows_system_in_place(state.tokenizer))
        with named_as(names):
            chat = ChatCompletionRequest(messages=messages, **body.chat_fields(fields))
            call = call_of(http, chat)
            return call, ChatJob(state, chat, call), tools

    if http.state.num_body_bytes > BIG_BODY_BYTES:
        return await state.threads.run(tenant_of(http), make)
    return make()
