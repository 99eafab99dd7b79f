"""The OpenAI routes (chat, completions, models), and tokenize and detokenize."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from fastdeploy_core.plugins.drivers import part
from fastdeploy_core.serving.http.errors import ApiError
from fastdeploy_core.serving.http.json_body import read_model, tenant_of
from fastdeploy_core.serving.respond import answer, json_response
from fastdeploy_core.serving.state import ServerState

from .chat import ChatJob
from .completion import CompletionJob
from .schemas.chat import ChatCompletionRequest
from .schemas.common import SamplingFields
from .schemas.completion import CompletionRequest
from .schemas.tools import DetokenizeRequest, Invocation, TokenizeRequest
from .usage import Call

BODIES: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_REF = "#/components/schemas/{model}"
TIMEOUT_HEADER = "x-request-timeout"
# Fields of types.Request; the first one is of fastdeploy router.
PASSED_HEADERS = {"handover": "x-kv-handover", "traceparent": "traceparent"}
MAX_TIMEOUT_S = 1e6
SHORT_BODY_BYTES = 4096


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI entry of a body that read_model parses, since FastAPI does not see it."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_schemas() -> dict[str, Any]:
    """OpenAPI components of all bodies."""
    schemas: dict[str, Any] = {}
    for model in BODIES:
        schema = model.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    return schemas


def openai_router(state: ServerState) -> APIRouter:
    """Routes of one app."""
    router = APIRouter()
    created = int(time.time())
    pooled = part("pooled-invocations", "--runner pooling") if state.config.pooling else None

    @router.post("/v1/chat/completions", openapi_extra=_body_of(ChatCompletionRequest))
    async def chat_completions(http: Request) -> Response:
        body = await read_model(http, ChatCompletionRequest, state.parsers)
        return await answer(http, state, ChatJob(state, body, call_of(http, body)))

    @router.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(http: Request) -> Response:
        body = await read_model(http, CompletionRequest, state.parsers)
        return await answer(http, state, CompletionJob(state, body, call_of(http, body)))

    @router.post("/invocations")  # one path for all, as SageMaker calls it
    async def invocations(http: Request) -> Response:
        if pooled is not None:
            return await pooled(http)  # type: ignore[no-any-return]
        body = await read_model(http, Invocation, state.parsers)
        http.state.ignored_fields = None  # which fields have no effect is the other model's to say
        return await (completions if body.messages is None else chat_completions)(http)

    @router.get("/v1/models")
    @router.get("/v1/models/", include_in_schema=False)
    async def models() -> Response:
        cards = [_card(state, name, created) for name in state.model_names]
        return json_response({"object": "list", "data": cards})

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        state.check_name(model_id)
        return json_response(_card(state, model_id, created))

    @router.post("/tokenize", openapi_extra=_body_of(TokenizeRequest))
    async def tokenize(http: Request) -> Response:
        body = await read_model(http, TokenizeRequest, state.parsers)
        state.check_model(body.model)
        sees = state.media is not None and body.messages is not None
        threads = state.media_threads if sees else state.threads
        if body.chat_template is not None:
            threads = state.template_threads
        call = Call(http.state.request_id, tenant_of(http))
        return json_response(await threads.run(call.tenant, _tokenize, state, body, call))

    @router.post("/detokenize", openapi_extra=_body_of(DetokenizeRequest))
    async def detokenize(http: Request) -> Response:
        body = await read_model(http, DetokenizeRequest, state.parsers)
        state.check_model(body.model)
        _check_ids(state, body.tokens)
        decode = partial(state.tokenizer.decode, skip_special_tokens=body.skip_special_tokens)
        text = await state.threads.run(tenant_of(http), decode, body.tokens)
        return json_response({"prompt": text})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return json_response(state.tokenizer.description())

    return router


def call_of(http: Request, body: SamplingFields) -> Call:
    """What is known of a call besides its sampling. Its id is the client's, if it gave one in the
    body or in X-Request-Id, and shows in the answer, its headers and in logs."""
    if body.request_id is not None:
        http.state.request_id = body.request_id
    timeout_s = None
    given = http.headers.get(TIMEOUT_HEADER)
    if given is not None:
        try:
            timeout_s = float(given)
        except ValueError:
            timeout_s = math.nan
        if not 0.0 < timeout_s <= MAX_TIMEOUT_S:
            raise ApiError(
                400,
                f"{TIMEOUT_HEADER} must be a number of seconds up to {MAX_TIMEOUT_S:g}",
                param=TIMEOUT_HEADER,
            )
    is_short = http.state.num_body_bytes <= SHORT_BODY_BYTES
    passed = {name: http.headers.get(header, "") for name, header in PASSED_HEADERS.items()}
    return Call(http.state.request_id, tenant_of(http), timeout_s, is_short, passed)


def _card(state: ServerState, name: str, created: int) -> dict[str, Any]:
    adapter = state.adapters.get(name)
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        **dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True),
        **dict.fromkeys(("allow_create_engine", "allow_search_indices"), False),
        **dict.fromkeys(("allow_fine_tuning", "is_blocking"), False),
        "organization": "*",
        "group": None,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "FastDeploy",
        "root": name if adapter is None else adapter.adapter_path,
        "parent": None if adapter is None else state.config.served_names[0],
        "max_model_len": state.limits.max_model_len,
        "permission": [permission],
    }


def _check_ids(state: ServerState, tokens: list[int]) -> None:
    """ApiError for more ids than a prompt may have, and for one that is none."""
    most = state.limits.max_chars  # a token has at least one character
    if len(tokens) > most:
        raise ApiError(400, f"tokens has {len(tokens)} ids; at most {most} fit", param="tokens")
    wrong = next((t for t in tokens if not 0 <= t < state.limits.vocab_size), None)
    if wrong is not None:
        raise ApiError(
            400,
            f"token id {wrong} is out of vocabulary; possible: 0 to {state.limits.vocab_size - 1}",
            param="tokens",
        )


def _tokenize(state: ServerState, body: TokenizeRequest, call: Call) -> dict[str, Any]:
    tokenizer, limits = state.tokenizer, state.limits
    if body.messages is not None:
        token_ids = ChatJob(state, body.as_chat(), call).token_ids()
    else:
        limits.check_text(text := body.prompt or "", "prompt")
        token_ids = tokenizer.encode(text, body.add_special_tokens is not False) if text else []
    sizes = {"count": len(token_ids), "max_model_len": limits.max_model_len}
    strings = [tokenizer.token_string(t) for t in token_ids] if body.return_token_strs else None
    return {**sizes, "tokens": token_ids, "token_strs": strings}
