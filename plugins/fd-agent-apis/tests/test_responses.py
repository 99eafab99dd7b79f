"""/v1/responses on the demo model, through the openai client as it is."""

from __future__ import annotations

import json
from typing import Annotated, Any

import httpx
import openai
import pydantic
import pytest
from agent_shapes import (
    CITY,
    CODEX_FIRST,
    CODEX_SCHEMA,
    CODEX_SECOND,
    FRAMEWORK,
    WEATHER,
    responses_stream,
    sse,
)

QUESTION = "Where is the capital of China?"
ANSWER = "The capital of China is Beijing."
BLOCK = 64  # tokens of a block in the prefix cache


class Person(pydantic.BaseModel):
    """Bounded, so that any model comes to an end."""

    name: Annotated[str, pydantic.Field(max_length=20)]
    age: Annotated[int, pydantic.Field(ge=0, le=150)]


def test_an_answer(oai: openai.OpenAI) -> None:
    response = oai.responses.create(model="any", input=QUESTION, temperature=0, store=True)
    assert response.output_text == ANSWER
    assert response.status == "completed" and response.error is None
    assert response.model_extra["store"] is False  # said, since it was asked for
    (item,) = response.output
    assert item.type == "message" and item.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert set(response.model_extra["metrics"]) > {"queue_time_ms", "tokens_per_second"}
    counted = oai.responses.input_tokens.count(model="any", input=QUESTION)
    assert counted.input_tokens == response.usage.input_tokens


def test_a_stream_leads_to_the_same_answer(oai: openai.OpenAI, http: httpx.Client) -> None:
    body = {"model": "any", "input": QUESTION, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/responses", json=body) as response:
        final = responses_stream(sse(response))
    assert final["output"][0]["content"][0]["text"] == ANSWER
    with oai.responses.stream(model="any", input=QUESTION, temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == ANSWER
    assert kinds[-1] == "response.completed"


def test_thinking_is_a_reasoning_item(oai: openai.OpenAI, http: httpx.Client) -> None:
    asked: dict[str, Any] = {"input": QUESTION, "temperature": 0, "reasoning": {"effort": "high"}}
    response = oai.responses.create(model="any", **asked)
    thinking, message = response.output
    assert thinking.type == "reasoning" and "Beijing" in thinking.content[0].text
    assert message.content[0].text == ANSWER
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    with http.stream("POST", "/v1/responses", json={**asked, "stream": True}) as stream:
        final = responses_stream(sse(stream))
    texts = [item["content"][0]["text"] for item in final["output"]]
    assert texts == [thinking.content[0].text, ANSWER]
    # what was thought comes back, as the client has it
    turns = [{"role": "user", "content": QUESTION}]
    turns += [item.model_dump(exclude_none=True) for item in response.output]
    turns.append({"role": "user", "content": "And of France?"})
    again = oai.responses.create(model="any", input=turns, temperature=0, max_output_tokens=30)
    assert again.usage.input_tokens > response.usage.input_tokens


def test_no_effort_means_no_thinking(oai: openai.OpenAI) -> None:
    response = oai.responses.create(
        model="any", input=QUESTION, temperature=0, reasoning={"effort": "none"}
    )
    assert [item.type for item in response.output] == ["message"]


def test_a_tool_is_called_and_answered(oai: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: dict[str, Any] = {"model": "any", "tools": [WEATHER], "temperature": 0}
    first = oai.responses.create(input=turns, **asked)
    (call,) = first.output
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Paris"}
    turns += [item.model_dump(exclude_none=True) for item in first.output]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    second = oai.responses.create(input=turns, max_output_tokens=40, **asked)
    assert second.output_text
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens // BLOCK * BLOCK > 0


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    ],
)
def test_a_call_can_be_forced(http: httpx.Client, choice: Any) -> None:
    other = {"type": "function", "name": "other", "parameters": {"type": "object"}}
    body = {
        "input": "Hello",
        "tools": [WEATHER, other] if choice != "required" else [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "stream": True,
        "max_output_tokens": 300,
    }
    with http.stream("POST", "/v1/responses", json=body) as stream:
        final = responses_stream(sse(stream))
    calls = [item for item in final["output"] if item["type"] == "function_call"]
    assert [call["name"] for call in calls] == ["get_weather"]
    assert set(json.loads(calls[0]["arguments"])) == set(CITY["properties"])


def test_an_answer_fits_its_schema(oai: openai.OpenAI) -> None:
    parsed = oai.responses.parse(
        model="any", input="Name a person.", text_format=Person, temperature=0
    )
    assert isinstance(parsed.output_parsed, Person)
    whole = oai.responses.create(
        model="any",
        input="Say something as JSON.",
        text={"format": {"type": "json_object"}},
        temperature=0,
        max_output_tokens=200,
    )
    assert whole.status == "incomplete" or isinstance(json.loads(whole.output_text), dict)


def test_an_answer_without_room_is_incomplete(oai: openai.OpenAI, http: httpx.Client) -> None:
    asked = {"input": QUESTION, "temperature": 0, "max_output_tokens": 3}
    response = oai.responses.create(model="any", **asked)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete" and response.usage.output_tokens == 3
    with http.stream("POST", "/v1/responses", json={**asked, "stream": True}) as stream:
        assert responses_stream(sse(stream))["status"] == "incomplete"


@pytest.mark.parametrize("body", [CODEX_FIRST, CODEX_SECOND, CODEX_SCHEMA])
def test_what_codex_sends_is_answered(http: httpx.Client, body: dict[str, Any]) -> None:
    with http.stream("POST", "/v1/responses", json=body) as response:
        ignored = response.headers["x-ignored-fields"].split(", ")
        final = responses_stream(sse(response))
    assert ignored == ["tools.3"]  # web_search; fields that clients always send are not named
    assert final["output"]
    if "text" in body:
        text = final["output"][-1]["content"][0]["text"]
        assert final["status"] == "incomplete" or set(json.loads(text)) == {"title"}


def test_the_second_turn_finds_the_first_in_the_cache(http: httpx.Client) -> None:
    usage = []
    for body in (CODEX_FIRST, CODEX_SECOND):
        with http.stream("POST", "/v1/responses", json=body) as response:
            usage.append(responses_stream(sse(response))["usage"])
    cached = usage[1]["input_tokens_details"]["cached_tokens"]
    assert cached >= usage[0]["input_tokens"] // BLOCK * BLOCK > 200


def test_what_frameworks_send_is_answered(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json=FRAMEWORK)
    assert answer.status_code == 200, answer.text
    openai.types.responses.Response.model_validate(answer.json())


def test_fields_of_vllm_have_their_effect(oai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "input": QUESTION, "temperature": 0}
    switch = {"enable_thinking": False}
    more = {"request_id": "mine", "stop": ["is"], "chat_template_kwargs": switch, "seed": 5}
    stopped = oai.responses.with_raw_response.create(**asked, extra_body=more)
    answer = stopped.parse()
    assert (answer.id, answer.output_text) == ("resp_mine", "The capital of China ")
    assert "x-ignored-fields" not in stopped.headers
    with pytest.raises(openai.BadRequestError, match="top_k"):
        oai.responses.create(**asked, extra_body={"top_k": -2})


def test_a_long_input_is_cut_where_it_may_be(oai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "input": "word " * 3000, "max_output_tokens": 8}
    with pytest.raises(openai.BadRequestError, match="too long"):
        oai.responses.create(**asked)
    answer = oai.responses.create(**asked, truncation="auto", safety_identifier="s")
    assert answer.usage is not None and answer.usage.input_tokens == 2048 - 8
    assert (answer.truncation, answer.safety_identifier) == ("auto", "s")
    with pytest.raises(openai.BadRequestError, match="truncation is 'tail'"):
        oai.responses.create(**asked, extra_body={"truncation": "tail"})


def test_log_probabilities_are_those_of_chat(oai: openai.OpenAI) -> None:
    user: Any = [{"role": "user", "content": QUESTION}]
    chat = oai.chat.completions.create(
        model="any", messages=user, temperature=0, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    expected = [token.model_dump() for token in chat.choices[0].logprobs.content or ()][:-1]
    asked: dict[str, Any] = {"model": "any", "input": QUESTION, "temperature": 0, "top_logprobs": 2}
    asked["include"] = ["message.output_text.logprobs"]
    part = oai.responses.create(**asked).output[0].content[0]
    assert [token.model_dump() for token in part.logprobs] == expected  # without the end of text
    with oai.responses.stream(**asked) as stream:
        shown = [event for event in stream if event.type == "response.output_text.delta"]
        whole = stream.get_final_response().output[0].content[0]
    tokens = [token.token for event in shown for token in event.logprobs]
    assert "".join(tokens) == ANSWER and tokens == [token["token"] for token in expected]
    assert whole.logprobs == part.logprobs
    thinking = oai.responses.create(**asked, reasoning={"effort": "high"}).output[-1].content[0]
    assert "".join(token.token for token in thinking.logprobs).endswith(ANSWER)


def test_what_is_stored_elsewhere_is_not_here(oai: openai.OpenAI) -> None:
    for ask in (oai.responses.retrieve, oai.responses.delete, oai.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="nothing is stored here"):
            ask("resp_1")


def test_a_slash_at_the_end_leads_to_the_route(oai: openai.OpenAI) -> None:
    answer = httpx.post(f"{oai.base_url}responses/", json={"input": "hello"})
    assert answer.status_code == 307, answer.text
    assert answer.headers["location"] == "/v1/responses"


def test_an_answer_that_was_begun_is_continued(oai: openai.OpenAI) -> None:
    begun = {"type": "message", "role": "assistant", "id": "msg_1", "status": "incomplete"}
    begun["content"] = [{"type": "output_text", "text": "The capital of"}]
    turns: list[Any] = [{"role": "user", "content": QUESTION}, begun]
    asked: dict[str, Any] = {"model": "any", "temperature": 0}
    assert oai.responses.create(**asked, input=turns).output_text == " China is Beijing."
    turns[1] = {**begun, "status": "completed"}
    assert oai.responses.create(**asked, input=turns).output_text != " China is Beijing."
