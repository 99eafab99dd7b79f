"""The three APIs say the same, and a client that leaves ends its request, whichever it used."""

from __future__ import annotations

import re
import time
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agent_shapes import NUMBERS
from server_process import ServerProcess

from fastdeploy_core.plugins.known import providers

PROMPTS = (
    "Where is the capital of China?",
    "12 + 30 =",
    "Tell me about <|im_end|> and <b>.",
    "Once upon a time",
    "你好",
)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_the_same_prompt_gets_the_same_text(
    oai: openai.OpenAI, claude: anthropic.Anthropic, prompt: str, system: str
) -> None:
    user: list[Any] = [{"role": "user", "content": prompt}]
    whole = [{"role": "system", "content": system}, *user] if system else user
    chat = oai.chat.completions.create(
        model="any", messages=whole, temperature=0, max_completion_tokens=40
    )
    response = oai.responses.create(
        model="any",
        input=prompt,
        instructions=system or None,
        temperature=0,
        max_output_tokens=40,
    )
    message = claude.messages.create(
        model="any",
        system=system,
        messages=user,
        max_tokens=40,
        extra_body={"temperature": 0},
    )
    text = "".join(block.text for block in message.content)
    assert chat.choices[0].message.content == response.output_text == text
    assert chat.usage.prompt_tokens == response.usage.input_tokens
    usage = message.usage
    assert chat.usage.prompt_tokens == usage.input_tokens + usage.cache_read_input_tokens


def _aborted(http: httpx.Client) -> float:
    found = re.search(r"^fastdeploy:requests_aborted\S* (\S+)$", http.get("/metrics").text, re.M)
    assert found
    return float(found[1])


LONG: dict[str, Any] = {
    "/v1/responses": {
        "input": "Count.",
        "max_output_tokens": 1500,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": NUMBERS}},
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": 1500,
        "output_config": {"format": {"type": "json_schema", "schema": NUMBERS}},
    },
}


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("path", LONG)
def test_a_client_that_leaves_ends_its_request(
    server: ServerProcess, http: httpx.Client, path: str, is_stream: bool
) -> None:
    before = _aborted(http)
    body = {**LONG[path], "stream": is_stream}
    with httpx.Client(base_url=server.url, timeout=20) as client:
        if is_stream:
            with client.stream("POST", path, json=body) as response:
                assert next(response.iter_lines()).startswith("event: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body, timeout=0.5)
    deadline = time.monotonic() + 20
    while _aborted(http) == before:
        assert time.monotonic() < deadline, "the request goes on without its client"
        time.sleep(0.05)
    assert _aborted(http) == before + 1
    while http.get("/load").json() != {"server_load": 0}:
        assert time.monotonic() < deadline, "its place was not given back"
        time.sleep(0.05)


def test_the_core_knows_exactly_these_routes(http: httpx.Client) -> None:
    """It names what to install where they are missing."""
    paths = http.get("/openapi.json").json()["paths"]
    ours = {route for route, name in providers("route").items() if name == "fd-agent-apis"}
    assert ours <= {f"{m.upper()} {path}" for path in paths for m in paths[path]}
    added = {path for path in paths if path.startswith(("/v1/responses", "/v1/messages"))}
    assert {f"POST {path}" for path in added} == ours
