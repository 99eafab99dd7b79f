"""Requests in the shapes that agents send, made up for this suite, and what any stream must be."""

from __future__ import annotations

from typing import Any

import anthropic.types
import httpx
import msgspec
import openai.types.responses
from pydantic import TypeAdapter

Event = dict[str, Any]
_RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)
_MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NUMBERS = {  # an answer that takes long
    "type": "object",
    "properties": {"n": {"type": "array", "items": {"type": "integer"}, "minItems": 300}},
    "required": ["n"],
    "additionalProperties": False,
}
TITLE = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 20}},
    "required": ["title"],
    "additionalProperties": False,
}
RULES = "Work in small steps. Read a file before it is changed. Say what was done. " * 4
WEATHER = {"type": "function", "name": "get_weather", "description": "Weather", "parameters": CITY}
SHELL = {
    "type": "function",
    "name": "run",
    "description": "Run a command",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "limit": {"type": "number"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
# Function tools beside kinds that only some servers know.
CODEX_TOOLS = [
    SHELL,
    {"type": "namespace", "name": "team", "description": "Others", "tools": [WEATHER]},
    {"type": "custom", "name": "patch", "format": {"type": "text"}},
    {"type": "web_search", "external_web_access": True},
]
CODEX_FIRST: dict[str, Any] = {
    "model": "any-name",
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": "msg_a",
            "role": role,
            "content": [{"type": "input_text", "text": text}],
        }
        for role, text in (
            ("developer", RULES),
            ("developer", "The folder is a project."),
            ("user", "Context: none."),
            ("user", "Where is the capital of China?"),
        )
    ],
    "tools": CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a-session",
    "client_metadata": {"turn": "1"},
    "max_output_tokens": 40,
}
CODEX_SECOND = {
    **CODEX_FIRST,
    "input": [
        *CODEX_FIRST["input"],
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "I look at the list."}],
            "encrypted_content": None,
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "status": "completed",
            "call_id": "call_1",
            "name": "run",
            "arguments": '{"cmd": "ls"}',
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "a.txt"},
    ],
}
CODEX_SCHEMA = {
    **CODEX_FIRST,
    "text": {
        "format": {"type": "json_schema", "strict": True, "schema": TITLE, "name": "an_answer"},
        "verbosity": "medium",
    },
}
FRAMEWORK = {
    "model": "any-name",
    "include": [],
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": "Where is the capital of China?"},
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{broken"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "sunny"}],
        },
    ],
    "tools": [],
    "tool_choice": "auto",
    "max_output_tokens": 20,
}

CLAUDE_TOOLS = [
    {
        "name": "Bash",
        "description": "Run a command",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "Later", "input_schema": {"type": "object", "properties": {}}, "defer_loading": True},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
]
CLAUDE_FIRST: dict[str, Any] = {
    "model": "any-name",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: version=1.2.3;"},
        {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Some context."},
                {"type": "text", "text": "Where is the capital of China?"},
            ],
        },
        {
            "role": "system",
            "content": [
                {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "metadata": {"user_id": '{"session": "a"}'},
    "thinking": {"type": "adaptive", "display": "updates"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "safeguards": [{"type": "dangerous_tool_use", "classifier_context": {"v": 1}}],
    "stop_sequences": [],
    "tools": CLAUDE_TOOLS,
}
CLAUDE_SECOND = {
    **CLAUDE_FIRST,
    "messages": [
        CLAUDE_FIRST["messages"][0],
        {"role": "system", "content": RULES},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I list files.", "signature": "any"},
                {"type": "redacted_thinking", "data": "AAAA"},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [
                        {"type": "text", "text": "a.txt"},
                        {"type": "tool_reference", "tool_name": "Later"},
                    ],
                    "is_error": False,
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
}
CLAUDE_TITLE = {
    "model": "any-name",
    "max_tokens": 32000,
    "stream": True,
    "system": CLAUDE_FIRST["system"],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Where is Paris?"}]}],
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": TITLE}},
    "tools": [],
}


def sse(response: httpx.Response) -> list[Event]:
    """The events of a stream; each is named by its type."""
    assert response.status_code == 200, response.read()
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.read().decode().strip().split("\n\n"):
        name, data = block.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        events.append(msgspec.json.decode(data[6:]))
        assert events[-1]["type"] == name[7:]
    return events


def responses_stream(events: list[Event]) -> dict[str, Any]:
    """The final response, after every event was held to OpenAI's types and order."""
    for event in events:
        _RESPONSE_EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first, second, *middle, last = events
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"]["output"] == [] == second["response"]["output"]
    items: list[dict[str, Any]] = []
    current: list[Event] = []
    for event in middle:
        current.append(event)
        assert event["output_index"] == len(items)
        if event["type"] == "response.output_item.done":
            items.append(_item(current))
            current = []
    assert not current, "an item has no end"
    response: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert response["output"] == items
    assert response["id"] == first["response"]["id"]
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return response


def _item(events: list[Event]) -> dict[str, Any]:
    added, *middle, done = events
    assert added["type"] == "response.output_item.added"
    item: dict[str, Any] = done["item"]
    assert added["item"]["id"] == item["id"] and added["item"]["status"] == "in_progress"
    assert {event["item_id"] for event in middle} == {item["id"]}
    kinds = [event["type"].removeprefix("response.") for event in middle]
    said = "".join(event["delta"] for event in middle if event["type"].endswith(".delta"))
    num_deltas = sum(kind.endswith(".delta") for kind in kinds)
    if item["type"] in ("message", "reasoning"):
        name = "output_text" if item["type"] == "message" else "reasoning_text"
        wanted = ["content_part.added", *[f"{name}.delta"] * num_deltas]
        assert kinds == [*wanted, f"{name}.done", "content_part.done"]
        (part,) = item["content"]
        assert part["text"] == said == middle[-2]["text"]
        assert middle[-1]["part"] == part
    else:
        is_custom = item["type"] == "custom_tool_call"
        name = "custom_tool_call_input" if is_custom else "function_call_arguments"
        field = "input" if is_custom else "arguments"
        assert kinds == [*[f"{name}.delta"] * num_deltas, f"{name}.done"]
        assert item[field] == middle[-1][field] == (said or "{}")
        assert added["item"]["call_id"] == item["call_id"]
    return item


def messages_stream(events: list[Event]) -> dict[str, Any]:
    """The final message, after every event was held to Anthropic's types and order."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    blocks: list[dict[str, Any]] = []
    pieces: list[str] | None = None
    for event in events:
        if event["type"] == "ping":
            continue
        _MESSAGE_EVENT.validate_python(event)
        if event["type"] == "content_block_start":
            assert pieces is None and event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            pieces = []
        elif event["type"] == "content_block_delta":
            assert pieces is not None and event["index"] == len(blocks) - 1
            kind = event["delta"]["type"].removesuffix("_delta")
            text = event["delta"][{"input_json": "partial_json"}.get(kind, kind)]
            if kind == "signature":
                blocks[-1]["signature"] = text
            else:
                pieces.append(text)
        elif event["type"] == "content_block_stop":
            assert pieces is not None and event["index"] == len(blocks) - 1
            block, text = blocks[-1], "".join(pieces)
            if block["type"] == "tool_use":
                block["input"] = msgspec.json.decode(text or "{}")
            else:
                block[block["type"]] = text
            pieces = None
    assert pieces is None, "a block has no end"
    message.update(events[-2]["delta"], content=blocks, usage=events[-2]["usage"])
    anthropic.types.Message.model_validate(message)
    return message
