"""Small routes and habits of other servers' users: what is asked by hand, by probes, by tools."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.serving.openai.schemas.chat import ChatCompletionRequest
from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_core.types import StructuredOutputsParams
from tests.server_support import LiveServer, ScriptedEngine, events_of, live

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def test_a_route_that_is_not_there_names_itself_and_those_that_are(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completion", json=CHAT)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert "there is no route POST /v1/chat/completion here" in message
    assert "did you mean /v1/chat/completions?" in message
    for path in ("/v1/completions", "/health", "/tokenize", "/metrics"):
        assert path in message
    assert "did you mean" not in client.get("/xyzzy").json()["error"]["message"]


def test_slashes_too_many_lead_to_the_route(client: httpx.Client, server: LiveServer) -> None:
    """vLLM's servers answer 307 to a slash at the end."""
    for path in ("/v1/chat/completions/", "//v1//chat/completions?a=b"):
        answer = client.post(server.url + path, json=CHAT)
        assert answer.status_code == 307, answer.text
        answer = client.post(server.url + path, json=CHAT, follow_redirects=True)
        assert answer.json()["object"] == "chat.completion"
        assert answer.url.path == "/v1/chat/completions"
        assert answer.url.query == path.encode().partition(b"?")[2]
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()
    for path in ("/x/", "//evil.example/", "/health/live/x/"):
        assert client.get(server.url + path).status_code == 404


def test_azures_clients_find_the_routes(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    with live(engine, tokenizer, api_keys=("k",)) as server:
        more = {"azure_endpoint": server.url, "api_version": "2024-10-21"}
        azure = openai.AzureOpenAI(api_key="k", **more)
        chat = azure.chat.completions.create(**CHAT)
        assert chat.choices[0].message.content == "Hello, world!"
        chunks = azure.chat.completions.create(**CHAT, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello, world!"
        assert azure.completions.create(model="tiny", prompt="Hi").choices[0].text
        assert [model.id for model in azure.models.list()] == ["tiny"]
        newer = openai.OpenAI(base_url=f"{server.url}/openai/v1/", api_key="k")
        assert newer.chat.completions.create(**CHAT).choices[0].message.content
        with pytest.raises(openai.AuthenticationError):
            openai.AzureOpenAI(api_key="other", **more).models.list()
        with pytest.raises(openai.NotFoundError, match="there is no route"):
            azure.images.generate(prompt="x")


def test_a_path_of_another_method_says_which(client: httpx.Client) -> None:
    answer = client.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["Allow"] == "POST"
    assert "this path answers POST" in answer.json()["error"]["message"]


def test_a_client_without_a_key_is_told_no_routes(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    with live(engine, tokenizer, api_keys=("k",)) as server:
        answer = httpx.get(f"{server.url}/nope")
        assert answer.status_code == 401
        assert "/v1/" not in answer.text
        for path in ("/health", "/ping"):
            assert httpx.get(server.url + path).status_code == 200
        assert httpx.get(f"{server.url}/tokenizer_info").status_code == 401


def test_invocations_is_chat_or_completion_by_its_body(
    client: httpx.Client, engine: ScriptedEngine
) -> None:
    chat = client.post("/invocations", json={**CHAT, "x_unknown": 1})
    assert chat.json()["object"] == "chat.completion"
    assert chat.headers["X-Ignored-Fields"] == "x_unknown"
    text = client.post("/invocations", json={"model": "tiny", "prompt": "Hi"})
    assert text.json()["object"] == "text_completion"
    assert "X-Ignored-Fields" not in text.headers
    neither = client.post("/invocations", json={"model": "tiny"})
    assert neither.status_code == 400


def test_tokenizer_info_is_what_a_client_needs_for_prompts(
    client: httpx.Client, tokenizer: Tokenizer
) -> None:
    found = client.get("/tokenizer_info").json()
    assert found["tokenizer_class"]
    assert "messages" in found["chat_template"]
    assert all(isinstance(found[n], str) for n in found if n.endswith("_token"))
    assert str(tokenizer.path) not in str(found)


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_echo_puts_the_last_message_before_the_answer_if_it_is_the_assistants(
    client: httpx.Client, role: str
) -> None:
    said = [{"type": "text", "text": "And "}, {"type": "text", "text": "so: "}]
    messages = [*CHAT["messages"], {"role": role, "content": said}]
    body = {**CHAT, "messages": messages, "echo": True}
    expected = ("And so: " if role == "assistant" else "") + "Hello, world!"
    whole = client.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["message"]["content"] == expected
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        deltas = [c["delta"] for e in events_of(response) for c in e["choices"]]
    assert "".join(d.get("content") or "" for d in deltas) == expected


def test_a_turn_that_a_model_broke_off_does_not_end_the_conversation(client: httpx.Client) -> None:
    """Agents send back what they got: arguments that max_tokens cut, a turn of thinking alone."""
    function = {"name": "f", "arguments": '{"city": "Par'}
    cut = {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "a", "content": "no JSON"}
    thought = {"role": "assistant", "content": None, "reasoning_content": "Hm"}
    for turns in ([cut, result], [thought, *CHAT["messages"]]):
        body = {**CHAT, "messages": [*CHAT["messages"], *turns]}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text


def test_an_idle_connection_outlives_an_agents_tool() -> None:
    assert ServerConfig().keep_alive_s == 900


@pytest.mark.parametrize(
    ("route", "body", "field", "value"),
    [
        ("completions", {"prompt": "a", "max_tokens": None}, "max_tokens", 16),
        ("completions", {"prompt": "a", "seed": -5}, "seed", -5),
        ("chat/completions", {**CHAT, "thinking_token_budget": -1}, "thinking_token_budget", None),
        ("chat/completions", {**CHAT, "logprobs": False, "top_logprobs": 0}, "logprobs", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_vllms_clients_send_mean_the_same_here(
    client: httpx.Client,
    engine: ScriptedEngine,
    route: str,
    body: dict[str, Any],
    field: str,
    value: Any,
) -> None:
    answer = client.post(f"/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    assert getattr(engine.requests[-1].sampling, field) == value


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_no_answers_are_refused_on_both_routes(client: httpx.Client, route: str) -> None:
    answer = client.post(f"/v1/{route}", json={**CHAT, "prompt": "a", "n": 0})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


def test_as_many_answers_prompts_and_tools_as_rollouts_evaluations_and_agents_ask_for(
    client: httpx.Client,
) -> None:
    """They were 16, 64 and 128; vLLM has no such limits, OpenAI's API 128 answers."""
    many = {**CHAT, "n": 128, "temperature": 1, "max_tokens": 2}
    answer = client.post("/v1/chat/completions", json=many).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(128))
    body = {"prompt": ["a"] * 200, "max_tokens": 1}
    assert len(client.post("/v1/completions", json=body).json()["choices"]) == 200
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(300)]
    ChatCompletionRequest(**CHAT, tools=tools, tool_choice="auto")


def test_a_schema_beside_json_object_binds() -> None:
    """As clients of llama.cpp spell it; it was ignored."""
    schema = {"enum": [1]}
    for more, json in (({"schema": schema}, schema), ({"schema": {}}, None), ({}, None)):
        asked = {"type": "json_object", **more}
        constraint = ChatCompletionRequest(**CHAT, response_format=asked).constraint()
        assert constraint is not None and constraint.json == json
        assert bool(constraint.json_object) == (json is None)


def test_vllms_whole_structured_outputs_object_is_taken() -> None:
    nothing = dict.fromkeys(("regex", "choice", "grammar", "json_object", "structural_tag"))
    switches = dict.fromkeys(("disable_fallback", "disable_any_whitespace"), False)
    asked = {"json": {"const": None}, **nothing, **switches, "whitespace_pattern": None}
    constraint = ChatCompletionRequest(**CHAT, structured_outputs=asked).constraint()
    assert constraint == StructuredOutputsParams(json={"const": None})
    with pytest.raises(ValidationError, match="disable_any_whitespace"):
        ChatCompletionRequest(
            **CHAT, structured_outputs={"json": {}, "disable_any_whitespace": True}
        )


def test_a_tokenized_conversation_is_the_one_that_is_answered(
    client: httpx.Client, engine: ScriptedEngine
) -> None:
    plain = {"messages": CHAT["messages"], "return_token_strs": None, "tools": None}
    ids = client.post("/tokenize", json=plain).json()["tokens"]
    client.post("/v1/chat/completions", json=CHAT)
    assert engine.requests[-1].prompt_token_ids == ids
    both = {**plain, "add_generation_prompt": True, "continue_final_message": True}
    assert client.post("/tokenize", json=both).status_code == 400
    refused = client.post("/tokenize", json={**plain, "chat_template": "{{ 1 }}"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")


def test_a_template_of_a_request_counts_when_tokenizing(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    with live(engine, tokenizer, trust_request_chat_template=True) as server:
        body = {**CHAT, "chat_template": "{{ messages[0].content }}!"}
        ids = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    assert ids == tokenizer.encode("Hi!", False)
