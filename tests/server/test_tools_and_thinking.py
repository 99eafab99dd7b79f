"""Tool calls and thinking: found by parsers or forced by a grammar, the same in streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copy
from typing import Any

import httpx
import jsonschema
import pytest
from fd_parsers import forced
from tokenizers import Tokenizer as Backend

from fastdeploy_core.contracts.small import ToolCallDelta
from fastdeploy_core.grammar.compiler import GrammarCompiler
from fastdeploy_core.plugins.drivers import find
from fastdeploy_core.serving.openai.answer import Answer
from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_core.types import GrammarStart
from tests.server_support import ScriptedEngine, events_of, live

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
ASK = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER, TIME]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def client(engine: ScriptedEngine, tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    compiler = GrammarCompiler.start(
        tokenizer.tokenizer_json, find("grammar", "llguidance"), vocab_size=len(tokenizer)
    )
    options = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "compiler": compiler}
    try:
        with (
            live(engine, tokenizer, **options) as server,
            httpx.Client(base_url=server.url, timeout=60) as http,
        ):
            yield http
    finally:
        compiler.close()


def chat(client: httpx.Client, **fields: object) -> dict:
    response = client.post("/v1/chat/completions", json={**ASK, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(client: httpx.Client, **fields: object) -> dict:
    """A choice put together from its chunks."""
    body = {**ASK, "stream": True, **fields}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        chunks = events_of(response)
    message: dict = {"role": "assistant", "content": ""}
    calls: dict[int, dict] = {}
    reason = None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        reason = choice["finish_reason"] or reason
        message["content"] += delta.get("content", "")
        for name in ("reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", []):
            if part["index"] not in calls:
                assert part["id"]
                assert part["type"] == "function"
                calls[part["index"]] = {"name": part["function"]["name"], "arguments": ""}
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {"message": message, "finish_reason": reason}


def same(whole: dict, parts: dict) -> None:
    """A whole and a streamed choice say the same."""
    message = dict(whole["message"])
    assert message.pop("refusal") is None  # chunks never name it
    message["content"] = message["content"] or ""
    if "tool_calls" in message:
        message["tool_calls"] = [call["function"] for call in message["tool_calls"]]
    assert parts == {"message": message, "finish_reason": whole["finish_reason"]}


def test_a_call_is_found_and_ends_the_answer(engine: ScriptedEngine, client: httpx.Client) -> None:
    engine.script = lambda prompt, index: CALL
    choice = chat(client)
    (call,) = choice["message"]["tool_calls"]
    assert call["id"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    same(choice, streamed(client))


def test_arguments_stream_in_pieces(engine: ScriptedEngine, client: httpx.Client) -> None:
    city = "Paris " * 20
    engine.script = lambda prompt, index: f"So.\n{CALL.replace('Paris', city)}\nDone."
    body = {**ASK, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        deltas = [chunk["choices"][0]["delta"] for chunk in events_of(response)]
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    first, *others = parts
    assert (first["id"], first["function"]["name"]) == (parts[0]["id"], "get_weather")
    assert all(not {"id", "type"} & set(part) and "name" not in part["function"] for part in others)
    assert len(others) > 20 and all(part["function"]["arguments"] for part in others)
    arguments = "".join(part["function"]["arguments"] for part in parts)
    assert json.loads(arguments) == {"city": city}
    same(chat(client), streamed(client))


def test_a_call_that_is_cut_off_is_text_in_a_whole_answer(
    engine: ScriptedEngine, client: httpx.Client
) -> None:
    engine.script = lambda prompt, index: CALL
    size = CALL.index("ris")
    choice = chat(client, max_tokens=size)
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == '{"name": "get_weather", "arguments": {"city": "Pa'
    assert streamed(client, max_tokens=size)["message"]["tool_calls"] == [
        {"name": "get_weather", "arguments": '{"city": "Pa'}
    ]


def test_two_calls_keep_their_order(engine: ScriptedEngine, client: httpx.Client) -> None:
    engine.script = lambda prompt, index: CALL + "\n" + CALL.replace("Paris", "Rome")
    choice = chat(client)
    cities = [
        json.loads(c["function"]["arguments"])["city"] for c in choice["message"]["tool_calls"]
    ]
    assert cities == ["Paris", "Rome"]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    same(choice, streamed(client))
    assert len(chat(client, parallel_tool_calls=False)["message"]["tool_calls"]) == 1


def test_thinking_is_told_apart_under_both_names(
    engine: ScriptedEngine, client: httpx.Client
) -> None:
    engine.script = lambda prompt, index: f"<think>hmm, tools</think>\n\nSure. {CALL}"
    choice = chat(client)
    assert choice["message"]["reasoning_content"] == "hmm, tools"
    assert choice["message"]["reasoning"] == "hmm, tools"
    assert choice["message"]["content"].strip() == "Sure."
    assert choice["finish_reason"] == "tool_calls"
    same(choice, streamed(client))
    assert "reasoning" not in chat(client, include_reasoning=False)["message"]


def test_thinking_tokens_are_counted(engine: ScriptedEngine, client: httpx.Client) -> None:
    engine.script = lambda prompt, index: "<think>12345</think>done"
    body = client.post("/v1/chat/completions", json=ASK).json()
    details = body["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == 5


def test_tool_choice_none_hides_the_tools(
    engine: ScriptedEngine, tokenizer: Tokenizer, client: httpx.Client
) -> None:
    engine.script = lambda prompt, index: CALL
    choice = chat(client, tool_choice="none")
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == CALL
    assert "get_weather" not in tokenizer.decode(engine.requests[-1].prompt_token_ids)


def test_a_named_function_is_forced_by_a_grammar(
    engine: ScriptedEngine, client: httpx.Client
) -> None:
    engine.script = lambda prompt, index: '{"city": "Rome", "days": 2}'
    choice_of = {"type": "function", "function": {"name": "get_weather"}}
    choice = chat(client, tool_choice=choice_of)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Rome", "days": 2}'}
    assert choice["finish_reason"] == "tool_calls"
    assert engine.requests[-1].grammar
    same(choice, streamed(client, tool_choice=choice_of))


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_all_that_the_model_sees(
    engine: ScriptedEngine, client: httpx.Client, tokenizer: Tokenizer, mode: str
) -> None:
    engine.script = lambda prompt, index: '[{"name": "get_time", "parameters": {}}]'
    shown = [{"type": "function", "function": {"name": "get_time"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": shown}}
    choice = chat(client, tool_choice=allowed)
    prompt = tokenizer.decode(engine.requests[-1].prompt_token_ids)
    assert "get_time" in prompt and "get_weather" not in prompt
    assert bool(engine.requests[-1].grammar) == (mode == "required")
    assert (choice["finish_reason"] == "tool_calls") == (mode == "required")


@pytest.mark.parametrize("required", [False, True])
def test_a_whole_answer_has_no_call_that_was_cut_off(
    engine: ScriptedEngine, client: httpx.Client, required: bool
) -> None:
    calls = [{"name": "get_time", "parameters": {}}, {"name": "get_time", "parameters": {"a": 1}}]
    text = json.dumps(calls) if required else '{"city": "Rome"}'
    engine.script = lambda prompt, index: text
    forced = "required" if required else {"type": "function", "function": {"name": "get_weather"}}
    for size in range(1, len(text)):
        choice = chat(client, tool_choice=forced, max_tokens=size)
        assert choice["finish_reason"] == "length"
        found = choice["message"].get("tool_calls", [])
        whole = 0 if not required else (size > text.index("}}")) + (size > len(text) - 3)
        assert len(found) == whole, text[:size]
        assert all(json.loads(call["function"]["arguments"]) is not None for call in found)


def test_required_calls_are_forced_by_a_grammar(
    engine: ScriptedEngine, client: httpx.Client
) -> None:
    text = (
        '[{"name": "get_weather", "parameters": {"city": "a\\"}]{", "days": 1}}, '
        '{"name":"get_time","parameters":{}}]'
    )
    engine.script = lambda prompt, index: text
    choice = chat(client, tool_choice="required")
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "a\\"}]{", "days": 1}'},
        {"name": "get_time", "arguments": "{}"},
    ]
    assert choice["finish_reason"] == "tool_calls"
    assert engine.requests[-1].grammar
    same(choice, streamed(client, tool_choice="required"))
    same(choice, streamed(client, tool_choice="any"))  # Mistral's word


def test_forced_tools_may_define_one_name_differently_and_refer_to_themselves(
    engine: ScriptedEngine, client: httpx.Client
) -> None:
    """As pydantic's schemas of two tools whose models have the same name."""
    unit = {"properties": {"a": {"$ref": "#/$defs/Unit"}}, "required": ["a"]}
    tree = {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    schemas = {
        "f": {"type": "object", **unit, "$defs": {"Unit": {"enum": [1]}}},
        "g": {"type": "object", **unit, "$defs": {"Unit": {"enum": ["x"]}}},
        "h": {"type": "object", **tree},
    }
    tools = [{"type": "function", "function": {"name": n, "parameters": schemas[n]}} for n in "fgh"]
    wanted = forced.constraint(tools, None, True).json
    for name, given, is_good in [
        *(("f", {"a": 1}, True), ("f", {"a": "x"}, False), ("g", {"a": "x"}, True)),
        *(("h", {"next": {"next": {}}}, True), ("h", {"next": {"b": 1}}, False)),
    ]:
        calls = [{"name": name, "parameters": given}]
        assert jsonschema.Draft202012Validator(wanted).is_valid(calls) == is_good, (name, given)
    engine.script = lambda prompt, index: '[{"name": "g", "parameters": {"a": "x"}}]'
    (call,) = chat(client, tools=tools, tool_choice="required")["message"]["tool_calls"]
    assert call["function"] == {"name": "g", "arguments": '{"a": "x"}'}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_forced_calls_do_not_depend_on_how_text_is_cut(size: int) -> None:
    calls = [
        {"name": "a", "parameters": {"x": [1, {"y": "}\\\\"}], "name": "not a call"}},
        {"name": 'q"uote', "parameters": {}},
    ]
    text = json.dumps(calls, indent=1)
    answer = Answer(forced.RequiredCalls())
    for start in range(0, len(text), size):
        answer.push(text[start : start + size], 1, start + size >= len(text))
    found = [call["function"] for call in answer.collected.tool_calls()]
    assert [call["name"] for call in found] == [call["name"] for call in calls]
    assert [json.loads(call["arguments"]) for call in found] == [c["parameters"] for c in calls]


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    answer = Answer(forced.RequiredCalls())
    answer.push('[{"name": "a", "parameters": {"x": 1', 1, True)
    (call,) = answer.collected.tool_calls()
    assert call["function"] == {"name": "a", "arguments": '{"x": 1'}
    assert answer.finish_reason("length") == "length"


def test_call_ids_of_a_parser_are_kept() -> None:
    class Parser:
        def push(self, text: str) -> object:
            from fastdeploy_core.contracts.small import ParsedDelta

            return ParsedDelta(tool_calls=[ToolCallDelta(0, id="mine", name="f")])

        def finish(self) -> object:
            from fastdeploy_core.contracts.small import ParsedDelta

            return ParsedDelta()

    answer = Answer(Parser())  # type: ignore[arg-type]
    answer.push("x", 1, True)
    assert answer.collected.tool_calls()[0]["id"] == "mine"


def test_tool_messages_go_into_the_prompt(
    engine: ScriptedEngine, tokenizer: Tokenizer, client: httpx.Client
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    chat(client, messages=messages)
    prompt = tokenizer.decode(engine.requests[-1].prompt_token_ids)
    assert "[call get_time]<|tool|>noon" in prompt


def test_a_result_may_be_an_object_as_in_the_originals_documents(
    engine: ScriptedEngine, tokenizer: Tokenizer, client: httpx.Client
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": {"a": 1}}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "tool_calls": [call], "thoughts": "Look it up."},
        {"role": "tool", "tool_call_id": "1", "content": {"time": "noon", "where": "北京"}},
    ]
    chat(client, messages=messages)
    prompt = tokenizer.decode(engine.requests[-1].prompt_token_ids)
    assert '<|tool|>{"time": "noon", "where": "北京"}' in prompt
    refused = {**ASK, "messages": [{"role": "user", "content": {"time": "noon"}}]}
    assert client.post("/v1/chat/completions", json=refused).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "nope"}}},
        {"tool_choice": {"type": "function"}},
        {"tool_choice": "sometimes"},
        {"tool_choice": {"type": "allowed_tools"}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [TIME]}}},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{}]},
            }
        },
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "bad name"}}]},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": 3}}]},
        {"tools": [WEATHER] * 129},
        {"tools": "get_weather"},
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
    ],
)
def test_malformed_tools_are_refused(client: httpx.Client, fields: dict) -> None:
    response = client.post("/v1/chat/completions", json={**ASK, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize("choice", ["sometimes", 3, ["auto"], {"type": "function"}])
def test_a_wrong_tool_choice_hears_what_is_possible(client: httpx.Client, choice: Any) -> None:
    error = client.post("/v1/chat/completions", json={**ASK, "tool_choice": choice}).json()["error"]
    assert error["message"].startswith("tool_choice must be none, auto, required, {")
    assert error["param"] == "tool_choice"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"regex": "[ab]+"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"guided_regex": "a|b"},
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "a|b", "structured_outputs": {"regex": "a|b"}},
    ],
)
def test_each_way_to_constrain_an_answer_makes_a_grammar(
    engine: ScriptedEngine, client: httpx.Client, fields: dict
) -> None:
    chat(client, tools=None, **fields)
    assert engine.requests[-1].grammar
    assert engine.requests[-1].grammar_backend


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "("},
        {"guided_regex": "a" * 20000},
        {"structured_outputs": {}},
        {"guided_regex": "a", "structured_outputs": {"regex": "b"}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"grammar": "root ::= nothing"}},
        {"guided_json": "not json"},
    ],
)
def test_a_constraint_that_cannot_be_compiled_is_refused(
    client: httpx.Client, fields: dict
) -> None:
    response = client.post("/v1/chat/completions", json={**ASK, "tools": None, **fields})
    assert response.status_code == 400, response.text


@pytest.fixture
def thinking_folder(tokenizer_folder: Path, tmp_path: Path) -> Path:
    """The tokenizer, with the marks of thinking as tokens of their own."""
    backend = Backend.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.add_special_tokens(["<think>", "</think>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    copy(tokenizer_folder / "tokenizer_config.json", tmp_path)
    return tmp_path


def test_a_grammar_waits_for_the_end_of_thinking(thinking_folder: Path) -> None:
    thinker = Tokenizer.load(thinking_folder)
    marks = [thinker.token_to_id(mark) for mark in ("<think>", "</think>")]
    engine = ScriptedEngine(thinker, lambda prompt, index: '<think>hm</think>{"a": 1}')
    compiler = GrammarCompiler.start(
        thinker.tokenizer_json, find("grammar", "llguidance"), vocab_size=len(thinker)
    )
    forced = {
        "tools": [WEATHER, TIME],
        "tool_choice": {"type": "function", "function": TIME["function"]},
    }
    ask = {"response_format": {"type": "json_object"}, "tools": None}
    try:
        with (
            live(engine, thinker, reasoning_parser="qwen3", compiler=compiler) as server,
            httpx.Client(base_url=server.url, timeout=60) as client,
        ):
            choice = chat(client, **ask)
            assert choice["message"]["reasoning"] == "hm"
            assert choice["message"]["content"] == '{"a": 1}'
            assert engine.requests[-1].grammar_start == GrammarStart(marks[1], marks[0])
            same(choice, streamed(client, **ask))
            thinks = {**ask, "chat_template_kwargs": {"enable_thinking": True}}
            engine.script = lambda prompt, index: 'hm</think>{"a": 1}'
            choice = chat(client, **thinks)
            assert choice["message"]["reasoning"] == "hm"
            assert engine.requests[-1].grammar_start == GrammarStart(marks[1])
            call = chat(client, **forced, chat_template_kwargs={"enable_thinking": True})
            assert call["message"]["reasoning"] == "hm"
            assert call["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
            engine.script = lambda prompt, index: '{"a": "<think>"}'
            never = {**ask, "chat_template_kwargs": {"enable_thinking": False}}
            choice = chat(client, **never)
            assert choice["message"]["content"] == '{"a": "<think>"}'
            assert engine.requests[-1].grammar_start is None
    finally:
        compiler.close()


def test_without_a_grammar_backend_a_constraint_gets_400_and_the_command_that_installs_one(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    compiler = GrammarCompiler.start(tokenizer.tokenizer_json, None)
    schema = {"name": "a", "schema": {"type": "object"}}
    asks = [
        {"response_format": {"type": "json_schema", "json_schema": schema}},
        {"guided_regex": "[ab]"},
        {"structured_outputs": {"choice": ["a"]}},
        {"tools": [TIME], "tool_choice": "required"},
    ]
    with (
        live(engine, tokenizer, tool_call_parser="hermes", compiler=compiler) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        for ask in asks:
            body = {"messages": ASK["messages"], **ask}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 400, ask
            assert "pip install fd-grammar-llguidance" in response.json()["error"]["message"]
        assert chat(client)["message"]["content"], "other requests are answered"
    compiler.close()
