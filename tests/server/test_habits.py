"""Small routes and habits of other servers' users: what is asked by hand, by probes, by tools."""

from __future__ import annotations

import httpx
import pytest

from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.tokenizer import Tokenizer
from tests.server_support import ScriptedEngine, events_of, live

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


def test_an_idle_connection_outlives_an_agents_tool() -> None:
    assert ServerConfig().keep_alive_s == 900
