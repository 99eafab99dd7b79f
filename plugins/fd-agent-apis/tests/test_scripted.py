"""What a model must say at the right moment: answers are scripted, all else is real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agent_shapes import CITY, CODEX_TOOLS, messages_stream, responses_stream, sse
from fd_agent_apis.blocks import Blocks
from fd_agent_apis.hooks import fd_api_routes_at_root
from fd_parsers.hermes import HermesToolParser
from server_support import LiveServer, ScriptedEngine, live, write_tokenizer

from fastdeploy_core.errors import QueueFull, WorkerError
from fastdeploy_core.serving.plugin_routes import PluginRoutes
from fastdeploy_core.tokenizer import Tokenizer

KEY = "sk-key"
KEYED = {"x-api-key": KEY}
HI = [{"role": "user", "content": "Hi"}]
LONG_NAME = "mcp__" + "a_server_with_a_long_name__" * 3 + "tool"
TOOLS = [{"name": name, "input_schema": CITY} for name in ("Bash", LONG_NAME)]


def call(name: str, **arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.load(folder)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer, lambda prompt, index: "Hello, world!", max_model_len=2048)


@pytest.fixture
def server(engine: ScriptedEngine, tokenizer: Tokenizer) -> Iterator[LiveServer]:
    plugins = [PluginRoutes("fd-agent-apis", "", routes) for routes in fd_api_routes_at_root()]
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "api_keys": (KEY,)}
    with live(engine, tokenizer, plugins=plugins, **options) as running:
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30, headers=KEYED) as client:
        yield client


def ask_responses(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The response of a stream, which must be that of a whole answer but for its ids."""
    body = {"input": "Hi", "max_output_tokens": 400, **fields}
    with http.stream("POST", "/v1/responses", json={**body, "stream": True}) as stream:
        final = responses_stream(sse(stream))
    whole = http.post("/v1/responses", json=body).json()
    assert [_without_ids(i) for i in whole["output"]] == [_without_ids(i) for i in final["output"]]
    assert whole["status"] == final["status"]
    return final


def _without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def ask_messages(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"messages": HI, "max_tokens": 400, **fields}
    with http.stream("POST", "/v1/messages", json={**body, "stream": True}) as stream:
        final = messages_stream(sse(stream))
    whole = http.post("/v1/messages", json=body).json()
    assert [_without_ids(b) for b in whole["content"]] == [
        _without_ids(b) for b in final["content"]
    ]
    assert whole["stop_reason"] == final["stop_reason"]
    return final


def test_thinking_text_and_two_calls(engine: ScriptedEngine, http: httpx.Client) -> None:
    first, second = call("Bash", city="ä"), call(_shown(http, engine), city="b")
    engine.script = lambda prompt, index: f"<think>why</think>\n\nSo: {first}\n{second}\n"
    message = ask_messages(http, tools=TOOLS)
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["name"] for block in message["content"][2:]] == ["Bash", LONG_NAME]
    assert [block["input"] for block in message["content"][2:]] == [{"city": "ä"}, {"city": "b"}]
    ids = {block["id"] for block in message["content"][2:]}
    assert len(ids) == 2 and message["stop_reason"] == "tool_use"


def test_arguments_stream_in_pieces(engine: ScriptedEngine, http: httpx.Client) -> None:
    city = "Paris " * 20
    engine.script = lambda prompt, index: f"So: {call('Bash', city=city)} Done."
    body = {"max_tokens": 400, "stream": True, "tools": TOOLS, "messages": HI}
    with http.stream("POST", "/v1/messages", json=body) as stream:
        deltas = [event["delta"] for event in sse(stream) if "delta" in event]
    pieces = [d["partial_json"] for d in deltas if d.get("type") == "input_json_delta"]
    assert json.loads("".join(pieces)) == {"city": city} and len(pieces) > 20
    tools = [{"type": "function", "name": "Bash", "parameters": CITY}]
    body = {"input": "Hi", "max_output_tokens": 400, "stream": True, "tools": tools}
    with http.stream("POST", "/v1/responses", json=body) as stream:
        events = [e for e in sse(stream) if e["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(e["delta"] for e in events)) == {"city": city} and len(events) > 20
    ask_messages(http, tools=TOOLS)
    ask_responses(http, tools=tools)


def test_the_rest_of_a_call_comes_before_what_follows_it() -> None:
    text = f"So: {call('a', x=1)} and {call('b', y=[2])} done"
    first, second = text.index("1}"), text.index("[2]")
    parser = HermesToolParser([])
    said = [parser.push(part) for part in (text[:first], text[first:second], text[second:])]
    both = [piece.name for piece in said[1].tool_calls]  # with text between the two
    assert both == [None, "b"] and said[1].content.strip() == "and"
    blocks = Blocks()
    for delta in [*said, parser.finish()]:
        list(blocks.add(delta))
    list(blocks.close())
    shown = [(block.kind, block.name, block.text.strip()) for block in blocks.all]
    assert shown == [
        ("text", "", "So:"),
        ("call", "a", '{"x": 1}'),
        ("text", "", "and"),
        ("call", "b", '{"y": [2]}'),
        ("text", "", "done"),
    ]


def _shown(http: httpx.Client, engine: ScriptedEngine) -> str:
    """The name under which the model sees the long one."""
    http.post("/v1/messages", json={"messages": HI, "max_tokens": 9, "tools": TOOLS})
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_token_ids)
    name: str = prompt.split("(tools: Bash ")[1].split(" ")[0]
    assert len(name) <= 64 and name.startswith("mcp__")
    return name


def test_custom_and_namespaced_tools_keep_their_names(
    engine: ScriptedEngine, http: httpx.Client
) -> None:
    said = [call("patch", input='*** a\n"b"'), call("team__get_weather", city="Paris")]
    engine.script = lambda prompt, index: "\n".join(said)
    custom, function = ask_responses(http, tools=CODEX_TOOLS)["output"]
    assert (custom["type"], custom["name"]) == ("custom_tool_call", "patch")
    assert custom["input"] == '*** a\n"b"'
    assert (function["name"], function["namespace"]) == ("get_weather", "team")
    assert json.loads(function["arguments"]) == {"city": "Paris"}
    results = [
        {"type": f"{i['type']}_output", "call_id": i["call_id"], "output": "done"}
        for i in (custom, function)
    ]
    engine.script = lambda prompt, index: prompt[-200:]
    turns = [*HI, custom, function, *results]
    again = ask_responses(http, tools=CODEX_TOOLS, input=turns)
    assert "[call patch][call team__get_weather]" in again["output"][0]["content"][0]["text"]


def test_a_call_without_arguments(engine: ScriptedEngine, http: httpx.Client) -> None:
    engine.script = lambda prompt, index: call("run")
    (item,) = ask_responses(http, tools=CODEX_TOOLS)["output"]
    assert item["arguments"] == "{}"
    engine.script = lambda prompt, index: call("Bash")
    assert ask_messages(http, tools=TOOLS)["content"][0]["input"] == {}


def test_an_empty_answer(engine: ScriptedEngine, http: httpx.Client) -> None:
    engine.script = lambda prompt, index: ""
    (item,) = ask_responses(http)["output"]
    assert item["content"][0]["text"] == ""
    assert ask_messages(http)["content"] == []
    engine.script = lambda prompt, index: " \n"
    assert ask_messages(http)["content"] == [{"type": "text", "text": " \n"}]
    assert ask_responses(http)["output"][0]["content"][0]["text"] == " \n"


def test_the_context_ends_before_max_tokens(engine: ScriptedEngine, http: httpx.Client) -> None:
    engine.script = lambda prompt, index: "word " * 2000
    assert ask_messages(http, max_tokens=9000)["stop_reason"] == "model_context_window_exceeded"
    assert ask_messages(http, max_tokens=9)["stop_reason"] == "max_tokens"


def test_cached_tokens_are_counted_apart(http: httpx.Client) -> None:
    usage = ask_messages(http)["usage"]
    counted = http.post("/v1/messages/count_tokens", json={"messages": HI}).json()["input_tokens"]
    assert usage["cache_read_input_tokens"] == 2
    assert usage["input_tokens"] == counted - 2


def test_a_failure_in_a_stream_is_an_event(
    engine: ScriptedEngine, server: LiveServer, http: httpx.Client
) -> None:
    engine.fail = WorkerError("gone at /usr/lib/engine.py")
    body = {"input": "Hi", "stream": True}
    with http.stream("POST", "/v1/responses", json=body) as stream:
        events = sse(stream)
    last = events[-1]
    assert last["type"] == "response.failed" and last["sequence_number"] == len(events) - 1
    assert last["response"]["status"] == "failed"
    assert "engine failed" in last["response"]["error"]["message"]
    asked = {"messages": HI, "max_tokens": 9, "stream": True}
    with http.stream("POST", "/v1/messages", json=asked) as stream:
        last = sse(stream)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
    assert "/usr/lib" not in str(last)
    client = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
    with (
        client,
        pytest.raises(anthropic.APIStatusError, match="engine failed"),
        client.messages.stream(model="any", max_tokens=9, messages=HI) as stream,
    ):
        stream.until_done()
    for path, given in (("/v1/responses", {"input": "Hi"}), ("/v1/messages", asked)):
        assert http.post(path, json={**given, "stream": False}).status_code == 503


def test_a_full_queue_is_said_in_each_apis_way(
    engine: ScriptedEngine, server: LiveServer, http: httpx.Client
) -> None:
    engine.refuse = QueueFull("full", retry_after_s=7)
    answer = http.post("/v1/messages", json={"messages": HI, "max_tokens": 9, "stream": True})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    # counting asks neither the engine nor its queue
    assert http.post("/v1/messages/count_tokens", json={"messages": HI}).status_code == 200
    url = f"{server.url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client,
        pytest.raises(openai.RateLimitError),
    ):
        client.responses.create(model="any", input="Hi")


def test_both_ways_to_send_a_key(server: LiveServer) -> None:
    for given in ({"api_key": KEY}, {"auth_token": KEY, "api_key": None}):
        with anthropic.Anthropic(base_url=server.url, max_retries=0, **given) as client:
            assert client.messages.create(model="any", max_tokens=9, messages=HI).content
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        client.messages.create(model="any", max_tokens=9, messages=HI)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "authentication_error"


def test_other_errors_have_the_apis_shape(http: httpx.Client) -> None:
    for answer, status, kind in (
        (http.get("/v1/messages"), 405, "invalid_request_error"),
        (http.post("/v1/messages", content=b"x" * 40_000_000), 413, "request_too_large"),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == kind


def test_a_name_that_is_not_served(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    plugins = [PluginRoutes("fd-agent-apis", "", routes) for routes in fd_api_routes_at_root()]
    with (
        live(engine, tokenizer, plugins=plugins, verify_model_name=True) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        body = {"model": "other", "messages": HI, "max_tokens": 9}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = client.post(path, json=body)
            assert answer.status_code == 404
            assert answer.json()["error"]["type"] == "not_found_error"
        answer = client.post("/v1/responses", json={"model": "other", "input": "Hi"})
        assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"


def test_signs_of_life_while_a_call_is_held_back(
    engine: ScriptedEngine, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fd_agent_apis.messages_answer.PING_S", 0.0)
    engine.script = lambda prompt, index: call("Bash", city="x" * 40)
    body = {"messages": HI, "max_tokens": 400, "tools": TOOLS, "stream": True}
    with http.stream("POST", "/v1/messages", json=body) as stream:
        events = sse(stream)
    assert sum(event["type"] == "ping" for event in events) > 10
    assert messages_stream(events)["content"][0]["input"] == {"city": "x" * 40}


def test_a_large_body_is_read_like_a_small_one(http: httpx.Client) -> None:
    tools = [{**tool, "description": "words " * 8000} for tool in TOOLS]
    message = ask_messages(http, tools=tools, tool_choice={"type": "none"})
    assert message["content"] == [{"type": "text", "text": "Hello, world!"}]
    wrong = {"messages": [*HI, {"role": "robot"}], "max_tokens": 9, "tools": tools}
    error = http.post("/v1/messages", json=wrong).json()["error"]
    assert "messages.1.role" in error["message"]
    answer = http.post("/v1/responses", json={"input": "word " * 14_000})
    assert answer.status_code == 400 and "prompt is too long" in answer.json()["error"]["message"]
