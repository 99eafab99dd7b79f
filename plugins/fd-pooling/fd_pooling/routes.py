"""Routes: /v1/embeddings, /v2/embed, /pooling, /classify, /v1/reward, /score and /rerank, under
every path that clients use."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from fastdeploy_core.contracts.base import ApiRoutes
from fastdeploy_core.serving.http.errors import ApiError
from fastdeploy_core.serving.http.json_body import read_model
from fastdeploy_core.serving.openai.routes import call_of
from fastdeploy_core.serving.respond import answer
from fastdeploy_core.serving.state import ServerState

from .jobs import PoolingJob, Prompts, Vectors
from .prompts import Prompter
from .schemas import (
    EmbedRequest,
    InputRequest,
    Invocation,
    PairFields,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from .settings import PoolingSettings
from .vectors import check_dimensions, cosine, encoded

Body = TypeVar("Body", bound=PoolingFields)
Render = Callable[[Vectors, int], dict[str, Any]]

# Which routes answer for a model of each task.
ANSWERED = {
    "embed": "/v1/embeddings, /v1/embed, /v2/embed, /pooling, /score, /rerank",
    "classify": "/classify, /pooling, and /score and /rerank where it has one label",
    "reward": "/v1/reward, /pooling",
}


def pooling_routes() -> ApiRoutes:
    """All of them. Their errors have the shape of OpenAI's."""
    router = APIRouter()
    for endpoint, (model, paths) in _ROUTES.items():
        for path in paths:
            router.post(path, openapi_extra=_body_of(model))(endpoint)
    return ApiRoutes(router)


# -- the routes -----------------------------------------------------------------------------------


async def _embeddings(http: Request) -> Response:
    state, settings, body = await _read(http, InputRequest)
    _only(settings, "embed")
    return await _answer_list(http, state, body, "embedding", "embedding")


async def _embed(http: Request) -> Response:
    return await _cohere(http, "2")


async def _older_embed(http: Request) -> Response:
    return await _cohere(http, "1")


async def _cohere(http: Request, version: str) -> Response:
    state, settings, body = await _read(http, EmbedRequest)
    _only(settings, "embed")
    given, call_id = body.as_input(state.config.pooling.get("prompts", {})), _id(http, body)
    is_plain = version == "1" and not body.embedding_types

    def render(vectors: Vectors, num_tokens: int) -> dict[str, Any]:
        asked = body.embedding_types or ["float"]
        kinds = {kind: [encoded(v, kind) for v in vectors] for kind in asked}
        return {
            "id": call_id,
            "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
            "embeddings": kinds["float"] if is_plain else kinds,
            "texts": body.items(),
            "meta": {"api_version": {"version": version}, "billed_units": _units(num_tokens)},
        }

    return await _answer_input(http, state, given, render, "texts")


async def _pooling(http: Request) -> Response:
    state, settings, body = await _read(http, PoolingRequest)
    if body.task is not None and body.task != settings.task:
        raise ApiError(
            400,
            f"this server's model is for the task {settings.task}, not {body.task[:40]}; one for "
            "others is started with --convert, pooling of single tokens is not supported",
            param="task",
        )
    return await _answer_list(http, state, body, "pooling", "data")


async def _reward(http: Request) -> Response:
    state, settings, body = await _read(http, InputRequest)
    _only(settings, "reward")
    return await _answer_list(http, state, body, "reward", "score")


async def _classify(http: Request) -> Response:
    state, settings, body = await _read(http, InputRequest)
    _only(settings, "classify")
    call_id = _id(http, body)

    def render(vectors: Vectors, num_tokens: int) -> dict[str, Any]:
        data = [
            {
                "index": number,
                "label": settings.labels[int(vector.argmax())],
                "probs": vector.tolist(),
                "num_classes": settings.width,
            }
            for number, vector in enumerate(vectors)
        ]
        return _list(call_id, state.check_model(body.model), data, num_tokens)

    return await _answer_input(http, state, body, render)


async def _score(http: Request) -> Response:
    state, _, body = await _read(http, ScoreRequest)
    queries, documents = body.sides()
    call_id = _id(http, body)

    def render(scores: list[float], num_tokens: int) -> dict[str, Any]:
        data = [
            {"index": number, "object": "score", "score": value}
            for number, value in enumerate(scores)
        ]
        return _list(call_id, state.check_model(body.model), data, num_tokens)

    return await _answer_pairs(http, state, body, queries, documents, render)


async def _rerank(http: Request) -> Response:
    state, _, body = await _read(http, RerankRequest)
    query, documents = body.texts()
    call_id = _id(http, body)

    def render(scores: list[float], num_tokens: int) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda number: (-scores[number], number))
        results = [
            {"index": number, "relevance_score": scores[number]}
            | ({"document": {"text": documents[number]}} if body.return_documents else {})
            for number in order[: body.top_n or len(order)]
        ]
        return {
            "id": call_id,
            "model": state.check_model(body.model),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "results": results,
            "meta": {"billed_units": {"search_units": 1}},
        }

    return await _answer_pairs(http, state, body, [query], documents, render)


async def invocations(http: Request) -> Response:
    """Part `pooled-invocations`: /invocations, the one path that SageMaker calls. Answers as the
    route does that the body's keys belong to."""
    state: ServerState = http.app.state.server
    body = await read_model(http, Invocation, state.parsers)
    http.state.ignored_fields = None  # the route says which fields have no effect
    task = PoolingSettings.of(state.config.pooling).task
    keys = [key for key in _INVOKED if key in body.model_fields_set]
    return await _INVOKED[keys[0] if keys else task](http)


# By a key of the body; else by the task.
_INVOKED: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "query": _rerank,
    **dict.fromkeys(("queries", "text_1", "data_1"), _score),
    **dict.fromkeys(("texts", "inputs"), _embed),
    "embed": _embeddings,
    "classify": _classify,
    "reward": _pooling,
}
_ROUTES: dict[Callable[..., Any], tuple[type[PoolingFields], tuple[str, ...]]] = {
    _embeddings: (InputRequest, ("/v1/embeddings",)),
    _embed: (EmbedRequest, ("/v2/embed",)),
    _older_embed: (EmbedRequest, ("/v1/embed",)),
    _pooling: (PoolingRequest, ("/pooling",)),
    _reward: (InputRequest, ("/v1/reward", "/v1/chat/reward")),
    _classify: (InputRequest, ("/classify", "/v1/classify")),
    _score: (ScoreRequest, ("/score", "/v1/score")),
    _rerank: (RerankRequest, ("/rerank", "/v1/rerank", "/v2/rerank")),
}


# -- reading --------------------------------------------------------------------------------------


def _body_of(model: type[PoolingFields]) -> dict[str, Any]:
    """The OpenAPI entry of a body that read_model parses, since FastAPI does not see it."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _read(http: Request, model: type[Body]) -> tuple[ServerState, PoolingSettings, Body]:
    state: ServerState = http.app.state.server
    if not state.config.pooling:
        raise ApiError(
            400,
            "this server generates text and pools nothing; start one with: fastdeploy serve MODEL "
            "--runner pooling",
        )
    body = await read_model(http, model, state.parsers)
    state.check_model(body.model)
    return state, PoolingSettings.of(state.config.pooling), body


def _only(settings: PoolingSettings, task: str) -> None:
    if settings.task != task:
        raise ApiError(
            400,
            f"this server's model is for the task {settings.task}; possible: "
            f"{ANSWERED[settings.task]}",
        )


def _id(http: Request, body: PoolingFields) -> str:
    return call_of(http, cast("Any", body)).id  # it reads request_id alone


def _input_prompts(body: InputRequest) -> Prompts:
    def make(prompter: Prompter) -> list[list[int]]:
        special, cut = body.add_special_tokens, body.cut
        found = []
        for item in body.items():
            if isinstance(item, str):
                found.append(prompter.text(item, special is not False, cut))
            elif body.messages is None:
                found.append(prompter.ids(item, cut))
            else:
                ids = prompter.chat(
                    item,
                    add_generation_prompt=body.add_generation_prompt,
                    continue_final_message=body.continue_final_message,
                    template_kwargs=body.chat_template_kwargs,
                    add_special_tokens=bool(special),
                )
                found.append(prompter.ids(ids, cut))
        return found

    return make


# -- answering ------------------------------------------------------------------------------------


async def _answer_input(
    http: Request, state: ServerState, body: InputRequest, render: Render, param: str = ""
) -> Response:
    settings = PoolingSettings.of(state.config.pooling)
    if body.dimensions is not None:
        _only(settings, "embed")
        check_dimensions(settings, body.dimensions)
    param = param or ("input" if body.messages is None else "messages")
    call, items = call_of(http, cast("Any", body)), body.items()
    job = PoolingJob(
        state, body, call, len(items), _input_prompts(body), render, body.dimensions, param
    )
    return await answer(http, state, job)


async def _answer_list(
    http: Request, state: ServerState, body: InputRequest, kind: str, key: str
) -> Response:
    call_id = _id(http, body)

    def render(vectors: Vectors, num_tokens: int) -> dict[str, Any]:
        data = _data(kind, key, vectors, body)
        return _list(call_id, state.check_model(body.model), data, num_tokens)

    return await _answer_input(http, state, body, render)


async def _answer_pairs(
    http: Request,
    state: ServerState,
    body: PairFields,
    queries: list[str],
    documents: list[str],
    render: Callable[[list[float], int], dict[str, Any]],
) -> Response:
    """Scores of each document with its query: of a cross-encoder, or the cosine of embeddings."""
    settings, cut = PoolingSettings.of(state.config.pooling), body.cut
    most_asked, most_told = body.max_tokens_per_query, body.max_tokens_per_doc
    each = queries * len(documents) if len(queries) == 1 else queries
    if settings.task == "embed":
        if body.instruction is not None:
            raise ApiError(400, "embeddings have no instruction; leave it out", param="instruction")

        def make(prompter: Prompter) -> list[list[int]]:
            kept = [prompter.beginning(text, most_asked) for text in queries]
            kept += [prompter.beginning(text, most_told) for text in documents]
            ids = [prompter.text(text, True, cut) for text in kept]
            for one in ids[: len(queries)]:  # the others are checked by the name of documents
                prompter.check(one, "query" if isinstance(body, RerankRequest) else "queries")
            return ids

        def scores(vectors: Vectors, num_tokens: int) -> dict[str, Any]:
            one, two = vectors[: len(queries)], vectors[len(queries) :]
            one = one * len(two) if len(one) == 1 else one
            return render([cosine(a, b) for a, b in zip(one, two, strict=True)], num_tokens)

    else:
        _only(settings, "classify")
        if settings.width != 1:
            raise ApiError(
                400,
                f"this model has {settings.width} labels, so a pair has no single score; possible: "
                "/classify",
            )

        def make(prompter: Prompter) -> list[list[int]]:
            return [
                prompter.pair(
                    prompter.beginning(one, most_asked),
                    prompter.beginning(two, most_told),
                    body.instruction,
                    cut,
                )
                for one, two in zip(each, documents, strict=True)
            ]

        def scores(vectors: Vectors, num_tokens: int) -> dict[str, Any]:
            return render([float(vector[0]) for vector in vectors], num_tokens)

    call, count = call_of(http, cast("Any", body)), len(documents)
    job = PoolingJob(state, body, call, count, make, scores, None, "documents")
    return await answer(http, state, job)


def _data(
    kind: str, key: str, vectors: list[np.ndarray], body: InputRequest
) -> list[dict[str, Any]]:
    form = body.encoding_format or "float"
    return [
        {
            "object": kind,
            "index": number,
            key: encoded(vector, form, body.embed_dtype, body.endianness),
        }
        for number, vector in enumerate(vectors)
    ]


def _list(call_id: str, model: str, data: list[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
    return {
        "id": call_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": _usage(num_tokens),
    }


def _usage(num_tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}


def _units(num_tokens: int) -> dict[str, Any]:
    return {"input_tokens": num_tokens}
