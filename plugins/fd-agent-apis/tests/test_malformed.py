"""Bodies that are wrong get a 400 in the API's own shape that names the field."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest
from agent_shapes import CITY, NUMBERS

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
PICTURE = "data:image/png;base64,AAAA"

# What is wrong, as changes of a body that is right; and the field at fault.
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"input": []}, "input"),
    ({"input": ["Hi"]}, "input.0"),
    ({"input": [{"role": "robot", "content": "Hi"}]}, "input.0.role"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": [{"text": "Hi"}]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
    (
        {
            "input": [
                *HI,
                {"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]},
            ]
        },
        "input.1.content.0",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0"),
    ({"input": [{"content": "Hi"}]}, "input.0.type"),
    ({"input": [{"type": 7}]}, "input.0.type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input.0.call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": ""}]}, "input.0.name"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input.0.output"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input.0.input"),
    ({"input": "word " * 3000}, "input"),
    ({"instructions": ["Be brief."]}, "instructions"),
    ({"model": 3}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "9"}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"tools": {}}, "tools"),
    ({"tools": ["f"]}, "tools.0"),
    ({"tools": [{"name": "f"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name"),
    ({"tools": [TOOL, {"type": "mcp", "server_label": "s", "server_url": "u"}]}, "tools.1"),
    ({"tools": [{**TOOL, "parameters": "none"}]}, "tools.0.parameters"),
    ({"tools": [{**TOOL, "description": 3}]}, "tools.0.description"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{}]}]}, "tools.0.tools.0.type"),
    ({"tools": [TOOL] + [{**TOOL, "name": f"f{n}"} for n in range(1024)]}, "tools"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "some", "tools": []}},
        "tool_choice.mode",
    ),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "schema": {"type": "no such type"}}}},
        "text.format",
    ),
    ({"reasoning": "high"}, "reasoning"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort"),
]
MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages.0"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "system", "content": "Hi"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages.0.content.0.type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.0.content.0.text",
    ),
    (
        {
            "messages": [
                *HI,
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Look"},
                        {"type": "image", "source": {"type": "url", "url": PICTURE}},
                    ],
                },
            ]
        },
        "messages.1.content.1",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages.0.content.0.tool_use_id",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "image", "source": {}}],
                        }
                    ],
                }
            ]
        },
        "messages.0.content.0.content.0",
    ),
    (
        {
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": "x"}],
                },
            ]
        },
        "messages.1.content.0.input",
    ),
    (
        {
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                },
            ]
        },
        "messages",
    ),
    (
        {"messages": [*HI, {"role": "assistant", "content": [{"type": "thinking"}]}]},
        "messages.1.content.0.thinking",
    ),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
    ({"system": 3}, "system"),
    ({"system": [{"type": "text", "text": None}]}, "system.0.text"),
    ({"tools": "f"}, "tools"),
    ({"tools": [{"input_schema": CITY}]}, "tools.0.name"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [{"name": "", "input_schema": CITY}]}, "tools.0.name"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    (
        {
            "tools": [{"name": "f", "input_schema": CITY}],
            "tool_choice": {"type": "tool", "name": "g"},
        },
        "tool_choice.name",
    ),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": True}, "thinking"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 9}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"stream": 1}, "stream"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"effort": ""}}, "output_config.effort"),
    ({"mcp_servers": [{"name": "x", "url": "http://x"}]}, "mcp_servers"),
]


def _changed(right: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**right, **changes}.items() if value is not None}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("changes", "field"), RESPONSES)
def test_responses_name_the_field(
    http: httpx.Client, changes: dict[str, Any], field: str, is_stream: bool
) -> None:
    body = _changed({"input": "Hi", "max_output_tokens": 2, "stream": is_stream}, changes)
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field and error["type"] == "BadRequestError"
    assert field.split(".")[0] in error["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(("changes", "field"), MESSAGES)
def test_messages_name_the_field(
    http: httpx.Client, changes: dict[str, Any], field: str, path: str
) -> None:
    body = _changed({"messages": HI, "max_tokens": 2}, changes)
    answer = http.post(path, json=body)
    only_of_answers = {"max_tokens", "stream", "temperature", "stop_sequences"}
    is_long = changes == {"messages": [{"role": "user", "content": "word " * 3000}]}
    is_budget = field == "thinking.budget_tokens"
    if path.endswith("count_tokens") and (field in only_of_answers or is_long or is_budget):
        assert answer.status_code == 200, answer.text
        return
    assert answer.status_code == 400, answer.text
    whole = answer.json()
    assert whole["type"] == "error" and whole["error"]["type"] == "invalid_request_error"
    assert field in whole["error"]["message"]
    assert whole["request_id"] == answer.headers["x-request-id"] == answer.headers["request-id"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b"", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"max_tokens": NaN}', "application/json", 400),
        (b'{"a": 1, "a": 2}', "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"{}", "text/plain", 415),
    ],
)
def test_what_is_no_json_object_is_refused(
    http: httpx.Client, path: str, content: bytes, media_type: str, status: int
) -> None:
    answer = http.post(path, content=content, headers={"content-type": media_type})
    assert answer.status_code == status
    assert ("type" in answer.json()) == (path == "/v1/messages")


def test_the_words_that_agents_look_for_before_they_compact(http: httpx.Client) -> None:
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "word " * 3000}]}
    error = http.post("/v1/messages", json=body).json()["error"]
    count = http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert error["message"].startswith(f"prompt is too long: {count} tokens > 2047 maximum")
    assert "--max-model-len" in error["message"]
    huge = {"max_tokens": 2, "messages": [{"role": "user", "content": "word " * 90000}]}
    error = http.post("/v1/messages", json=huge).json()["error"]
    assert error["message"].startswith("prompt is too long: ")


def test_the_clients_raise_their_own_errors(
    oai: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    with pytest.raises(openai.BadRequestError) as of_openai:
        oai.responses.create(model="any", input="Hi", previous_response_id="resp_1")
    assert of_openai.value.param == "previous_response_id"
    assert "whole conversation" in str(of_openai.value)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(
            model="any", max_tokens=2, messages=HI, extra_body={"temperature": 9}
        )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "a_new_field": {"x": 1}}),
        ("/v1/responses", {"input": [*HI, {"type": "a_new_item"}], "max_output_tokens": 2}),
        ("/v1/responses", {"input": [*HI, {"type": "compaction"}], "max_output_tokens": 2}),
        ("/v1/messages", {"messages": HI, "max_tokens": 2, "a_new_field": [1]}),
        ("/v1/messages", {"messages": HI, "max_tokens": 2, "tools": [{"type": "bash_20990101"}]}),
        (
            "/v1/messages",
            {
                "messages": [*HI, {"role": "user", "content": [{"type": "a_new_block"}]}],
                "max_tokens": 2,
            },
        ),
    ],
)
def test_what_is_unknown_is_ignored_and_said(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"]


def test_a_wrong_schema_is_refused_before_a_stream_begins(http: httpx.Client) -> None:
    wrong = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]}
    for schema, status in ((wrong, 400), (NUMBERS, 200)):
        body = {
            "messages": HI,
            "max_tokens": 1,
            "stream": True,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        }
        answer = http.post("/v1/messages", json=body)
        assert answer.status_code == status, answer.text
        if status == 400:
            assert "output_config.format" in answer.json()["error"]["message"]
