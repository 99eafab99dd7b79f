"""/v1/messages on the demo model, through the anthropic client as it is."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from agent_shapes import CITY, CLAUDE_FIRST, CLAUDE_SECOND, CLAUDE_TITLE, messages_stream, sse

QUESTION = "Where is the capital of China?"
ANSWER = "The capital of China is Beijing."
HI: list[Any] = [{"role": "user", "content": QUESTION}]
WEATHER: Any = {"name": "get_weather", "description": "Weather", "input_schema": CITY}
BLOCK = 64  # tokens of a block in the prefix cache


def test_an_answer(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model="any", max_tokens=40, messages=HI)
    (block,) = message.content
    assert (block.type, block.text) == ("text", ANSWER)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message._request_id and message.id == f"msg_{message._request_id}"


def test_a_stream_leads_to_the_same_message(
    claude: anthropic.Anthropic, http: httpx.Client
) -> None:
    body = {"model": "any", "max_tokens": 40, "messages": HI, "stream": True}
    with http.stream("POST", "/v1/messages", json=body) as response:
        message = messages_stream(sse(response))
    assert message["content"] == [{"type": "text", "text": ANSWER}]
    assert message["usage"]["output_tokens"] == 13
    with claude.messages.stream(model="any", max_tokens=40, messages=HI) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().stop_reason == "end_turn"


def test_thinking_is_a_block(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "any", "max_tokens": 200, "thinking": {"type": "adaptive"}}
    whole = claude.messages.create(messages=HI, **asked)
    with claude.messages.stream(messages=HI, **asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thinking, text = message.content
        assert thinking.type == "thinking" and "Beijing" in thinking.thinking
        assert thinking.signature and text.text == ANSWER
    turns = [*HI, {"role": "assistant", "content": whole.content}]
    again = [*turns, {"role": "user", "content": "And of France?"}]
    assert claude.messages.create(messages=again, **asked).content
    off = claude.messages.create(messages=HI, **{**asked, "thinking": {"type": "disabled"}})
    assert [block.type for block in off.content] == ["text"]


def test_a_thinking_budget_is_kept(claude: anthropic.Anthropic) -> None:
    def think(budget: int) -> str:
        message = claude.messages.create(
            model="any",
            max_tokens=200,
            messages=HI,
            thinking={"type": "enabled", "budget_tokens": budget},
        )
        return message.content[0].thinking

    assert 0 < len(think(4)) < len(think(5000))


def test_a_tool_is_called_and_answered(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    turns: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: dict[str, Any] = {"model": "any", "max_tokens": 60, "tools": [WEATHER]}
    first = claude.messages.create(messages=turns, **asked)
    (call,) = first.content
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    assert first.stop_reason == "tool_use"
    body = {"messages": turns, **asked, "stream": True}
    with http.stream("POST", "/v1/messages", json=body) as response:
        assert messages_stream(sse(response))["content"][0]["input"] == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(messages=turns, **asked)
    assert second.content
    first_tokens = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert second.usage.cache_read_input_tokens >= first_tokens // BLOCK * BLOCK > 0


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_can_be_forced(claude: anthropic.Anthropic, choice: dict[str, Any]) -> None:
    message = claude.messages.create(
        model="any",
        max_tokens=300,
        messages=[{"role": "user", "content": "Hello"}],
        tools=[WEATHER],
        tool_choice={**choice, "disable_parallel_tool_use": True},
    )
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "get_weather" and set(call.input) == {"city"}


def test_no_tool_may_be_called(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(
        model="any",
        max_tokens=40,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice={"type": "none"},
    )
    assert {block.type for block in message.content} == {"text"}


def test_why_it_ended(claude: anthropic.Anthropic) -> None:
    stopped = claude.messages.create(
        model="any", max_tokens=40, messages=HI, stop_sequences=["never", " is Bei"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is Bei")
    assert stopped.content[0].text == "The capital of China"
    cut = claude.messages.create(model="any", max_tokens=3, messages=HI)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3


def test_an_answer_that_was_begun_is_continued(claude: anthropic.Anthropic) -> None:
    turns = [*HI, {"role": "assistant", "content": "The capital of China is"}]
    message = claude.messages.create(model="any", max_tokens=40, messages=turns)
    assert message.content[0].text == " Beijing."


def test_tokens_are_counted_as_they_are_used(claude: anthropic.Anthropic) -> None:
    turns = [{"role": "user", "content": "What is the weather in Paris?"}]
    for more in ({}, {"tools": [WEATHER]}, {"system": "Be brief."}):
        counted = claude.messages.count_tokens(model="any", messages=turns, **more)
        used = claude.messages.create(model="any", max_tokens=1, messages=turns, **more).usage
        assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_an_answer_fits_its_schema(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/messages", json=CLAUDE_TITLE) as response:
        message = messages_stream(sse(response))
    assert set(json.loads(message["content"][-1]["text"])) == {"title"}


def test_what_claude_code_sends_is_answered(http: httpx.Client) -> None:
    usage, ignored = [], []
    for body in (CLAUDE_FIRST, CLAUDE_SECOND):
        with http.stream("POST", "/v1/messages?beta=true", json=body) as response:
            ignored.append(response.headers["x-ignored-fields"].split(", "))
            usage.append(messages_stream(sse(response))["usage"])
    assert ignored[0] == ["tools.2"]
    assert ignored[1] == ["tools.2", "messages.2.content.1", "messages.3.content.0.content.1"]
    first = usage[0]["input_tokens"] + usage[0]["cache_read_input_tokens"]
    assert usage[1]["cache_read_input_tokens"] >= first // BLOCK * BLOCK > 200


def test_the_billing_line_is_not_in_the_prompt(claude: anthropic.Anthropic) -> None:
    def count(*lines: str) -> int:
        system = [{"type": "text", "text": line} for line in lines]
        return claude.messages.count_tokens(model="any", messages=HI, system=system).input_tokens

    assert count("x-anthropic-billing-header: v=1;", "You help.") == count("You help.")


def test_many_small_counts_at_once(server: Any) -> None:
    import concurrent.futures

    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        concurrent.futures.ThreadPoolExecutor(8) as threads,
    ):

        def count(letter: str) -> int:
            body = {"model": "any", "messages": [{"role": "user", "content": letter}], "tools": []}
            return client.post("/v1/messages/count_tokens?beta=true", json=body).status_code

        assert set(threads.map(count, "abcdefghijklmnopqrstuvwxyz")) == {200}


def test_the_probe_at_start_is_harmless(http: httpx.Client) -> None:
    assert http.head("/api/hello").status_code == 404


def test_a_schema_binds_under_its_older_name_too(http: httpx.Client) -> None:
    word = {"type": "string", "enum": ["certainly"]}
    form = {"type": "json_schema", "schema": {"type": "array", "items": word, "maxItems": 1}}
    body = {"messages": HI, "max_tokens": 40, "thinking": {"type": "disabled"}}
    for asked in ({"output_format": form}, {"output_config": {"format": form}}):
        answer = http.post("/v1/messages", json={**body, **asked})
        assert "x-ignored-fields" not in answer.headers
        assert json.loads(answer.json()["content"][0]["text"]) in ([], ["certainly"])


def test_documents_of_text_are_read_below_their_titles(http: httpx.Client) -> None:
    def count(*blocks: Any) -> int:
        body = {"messages": [{"role": "user", "content": list(blocks)}]}
        return http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]

    text = {"type": "text", "text": "Paris is cold."}
    plain = {"type": "text", "media_type": "text/plain", "data": "Paris is cold."}
    found = {"type": "search_result", "title": "News", "source": "x", "content": [text]}
    blocks = {"type": "document", "title": "News", "source": {"type": "content", "content": [text]}}
    shown = count({"type": "text", "text": "News\nParis is cold."})
    assert count({"type": "document", "title": "News", "source": plain}) == shown
    assert count(found) == count(blocks) == shown
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [found]}
    turns = [*HI, {"role": "assistant", "content": [call]}, {"role": "ctx", "content": [result]}]
    answer = http.post("/v1/messages", json={"messages": turns, "max_tokens": 2})
    assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers


def test_fields_of_vllm_have_their_effect(http: httpx.Client) -> None:
    body = {"messages": HI, "max_tokens": 40, "structured_outputs": {"choice": ["Rome"]}}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = http.post("/v1/messages", json={**body, **off})
    assert answer.json()["content"] == [{"type": "text", "text": "Rome"}]
    assert "x-ignored-fields" not in answer.headers
    stopped = http.post("/v1/messages", json={"messages": HI, "max_tokens": 40, "stop": ["is"]})
    assert stopped.json()["stop_sequence"] == "is"
    wrong = http.post("/v1/messages", json={**body, "seed": "1"})
    assert wrong.status_code == 400 and "seed" in wrong.json()["error"]["message"]
