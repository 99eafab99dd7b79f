"""The main job on real input: the demo model behind `fastdeploy serve`, used through openai's
client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import httpx
import openai
import pydantic
import pytest

from tests.server_process import REPOSITORY, ServerProcess, serving

MODEL = REPOSITORY / "models" / "ernie-tiny"
QUESTION = [{"role": "user", "content": "Where is the capital of China?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class Person(pydantic.BaseModel):
    """Bounded, so that any model comes to an end."""

    name: Annotated[str, pydantic.Field(max_length=20)]
    age: Annotated[int, pydantic.Field(ge=0, le=150)]


@pytest.fixture(scope="module")
def server(tensor_library: str) -> Iterator[ServerProcess]:
    options = ("--tensor-library", tensor_library, "--dtype", "float32", "--num-threads", "1")
    parsers = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes")
    limits = ("--max-model-len", "1024", "--num-gpu-blocks-override", "64")
    grammar = ("--guided-decoding-disable-any-whitespace",)
    with serving(MODEL, *options, *parsers, *limits, *grammar) as process:
        yield process


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_it_knows_the_capital_of_china(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="ernie-tiny", messages=QUESTION, temperature=0)
    assert "Beijing" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_says_the_same_as_a_whole_answer(api: openai.OpenAI) -> None:
    fields = {"model": "ernie-tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    whole = api.chat.completions.create(**fields)
    chunks = list(
        api.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_seed_gives_the_same_answer_twice(api: openai.OpenAI) -> None:
    def sample(seed: int) -> list[int]:
        answer = api.completions.create(
            model="ernie-tiny",
            prompt="Once upon a time",
            max_tokens=16,
            temperature=1.0,
            seed=seed,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        return answer.choices[0].token_ids

    assert sample(1) == sample(1)
    assert len({tuple(sample(seed)) for seed in range(4)}) > 1


def test_logprobs_are_log_probabilities(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model="ernie-tiny",
        messages=QUESTION,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
        max_tokens=5,
    )
    for entry in answer.choices[0].logprobs.content:
        best = entry.top_logprobs
        assert entry.token == best[0].token  # greedy takes the most likely one
        assert len(best) == 5
        values = [top.logprob for top in best]
        assert values == sorted(values, reverse=True)
        assert sum(2.718281828**value for value in values) <= 1.0001


def test_structured_output_is_valid_whatever_the_model_thinks(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(
        model="ernie-tiny",
        messages=[{"role": "user", "content": "Extract as JSON: Ann is 31 years old."}],
        response_format=Person,
        temperature=0,
        max_tokens=100,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_choices_and_patterns_are_kept(api: openai.OpenAI) -> None:
    for extra, possible in [
        ({"guided_choice": ["red", "green"]}, {"red", "green"}),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, {f"{n:03}" for n in range(1000)}),
    ]:
        answer = api.chat.completions.create(
            model="ernie-tiny",
            messages=QUESTION,
            max_tokens=20,
            # The constraint begins after the thinking, which here would take all 20 tokens.
            extra_body=extra | {"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert answer.choices[0].message.content in possible


@pytest.mark.parametrize("choice", ["required", "named"])
def test_forced_tools_are_called_with_valid_arguments(api: openai.OpenAI, choice: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields = {
        "model": "ernie-tiny",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [TOOL],
        "tool_choice": "required" if choice == "required" else named,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 100,
    }
    whole = api.chat.completions.create(**fields).choices[0]
    call = whole.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    assert whole.finish_reason == "tool_calls"
    with api.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]
    streamed = final.message.tool_calls[0].function
    assert (streamed.name, streamed.arguments) == (call.function.name, call.function.arguments)


def test_the_model_calls_a_tool_by_itself(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model="ernie-tiny",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[TOOL],
        temperature=0,
        max_tokens=100,
    ).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_what_a_processor_refuses_names_its_field(api: openai.OpenAI) -> None:
    """The engine process refuses it, so the name crosses a border."""
    with pytest.raises(openai.BadRequestError, match="must be 0 or more") as caught:
        api.completions.create(
            model="ernie-tiny",
            prompt="a",
            max_tokens=1,
            extra_body={"logits_processors_args": {"thinking_budget": -1}},
        )
    assert caught.value.param == "logits_processors_args"


def test_prompts_are_scored_by_echo(server: ServerProcess) -> None:
    body = {"prompt": "The capital of China is", "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
    (choice,) = answer["choices"]
    assert choice["text"] == body["prompt"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert "".join(choice["logprobs"]["tokens"]) == body["prompt"]


def test_a_repeated_prompt_is_read_from_the_cache(server: ServerProcess) -> None:
    body = {"prompt": "one two three " * 30, "max_tokens": 1}
    usages = [
        httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()["usage"]
        for _ in range(2)
    ]
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]
