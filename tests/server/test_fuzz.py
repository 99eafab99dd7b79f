"""Seeded fuzz over the request models: whatever a field holds, the answer is 200 or 4xx, never
5xx."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fastdeploy_core.serving.openai.schemas.chat import ChatCompletionRequest
from fastdeploy_core.serving.openai.schemas.completion import CompletionRequest
from fastdeploy_core.serving.openai.schemas.tools import DetokenizeRequest, TokenizeRequest
from fastdeploy_core.tokenizer import Tokenizer
from tests.server_support import ScriptedEngine, live

GOOD: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    ),
    "/v1/completions": (CompletionRequest, {"prompt": "x", "max_tokens": 4}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1, 2]}),
}
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 3, 17, 2**31, 2**63 - 1, -(2**63), 0.5, -1.5, 1e308, "", "a",
    "\x7f",
    "é" * 50, "x" * 3000, [], [0], [-1], [2**62], ["a"], [None], [[]], [[1], ["a"]], [{}], {},
    {"a": 1}, {"type": "function"}, {"type": "json_object"}, {"type": "json_schema"},
    {"type": "function", "function": {"name": "x"}}, [{"type": "function",
        "function": {"name": "f"}}],
    [{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text",
        "text": "x"}]}],
    [{"role": "assistant", "content": None, "tool_calls": [1]}], {"regex": "a+"}, {"choice": []},
    {"1": 5.0}, {"-1": 1}, {"include_usage": True}, {"json_schema": {"schema": 3}},
]  # fmt: skip


@pytest.fixture(scope="module")
def client(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    engine = ScriptedEngine(tokenizer, lambda prompt, index: "fine")
    with (
        live(engine, tokenizer, tool_call_parser="hermes", reasoning_parser="qwen3") as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        yield http


@pytest.mark.parametrize("route", GOOD)
def test_no_body_makes_a_server_error(client: httpx.Client, route: str) -> None:
    model, good = GOOD[route]
    names = sorted(field.alias or name for name, field in model.model_fields.items())
    draw = random.Random(20)
    statuses = set()
    bodies = [{**good, name: junk} for name in names for junk in JUNK]
    for body in draw.sample(bodies, min(len(bodies), 500)):
        if draw.random() < 0.3:
            body[draw.choice(names)] = draw.choice(JUNK)
        response = client.post(route, content=json.dumps(body).encode(), headers=JSON)
        assert response.status_code < 500, (body, response.text)
        statuses.add(response.status_code)
        if response.status_code >= 400:
            assert response.json()["error"]["message"], body
    assert {200, 400} <= statuses
    assert client.get("/load").json() == {"server_load": 0}


JSON = {"Content-Type": "application/json"}
