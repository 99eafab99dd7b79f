"""The newest openai client, unchanged: chat, streaming, tools, structured output, logprobs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pydantic
import pytest

from fastdeploy_core.grammar.compiler import GrammarCompiler
from fastdeploy_core.plugins.drivers import find
from fastdeploy_core.tokenizer import Tokenizer
from tests.server_support import ScriptedEngine, live

KEY = "sk-test"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class City(pydantic.BaseModel):
    name: str
    people: int


@pytest.fixture
def api(engine: ScriptedEngine, tokenizer: Tokenizer) -> Iterator[openai.OpenAI]:
    compiler = GrammarCompiler.start(
        tokenizer.tokenizer_json, find("grammar", "llguidance"), vocab_size=len(tokenizer)
    )
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "api_keys": (KEY,)}
    try:
        with (
            live(engine, tokenizer, compiler=compiler, **options) as server,
            openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client,
        ):
            yield client
    finally:
        compiler.close()


def test_chat(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="tiny", messages=HI, n=1, seed=3, max_tokens=100)
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_chat_stream_with_usage(api: openai.OpenAI) -> None:
    chunks = list(
        api.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello, world!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 14


def test_the_clients_own_stream_helper(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(model="tiny", messages=HI) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello, world!"


def test_tools_and_their_answers(engine: ScriptedEngine, api: openai.OpenAI) -> None:
    engine.script = lambda prompt, index: "3" if "<|tool|>" in prompt else CALL
    first = api.chat.completions.create(model="tiny", messages=HI, tools=[TOOL])
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    assert first.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    turns = [*HI, message.model_dump(exclude_none=True), result]
    second = api.chat.completions.create(model="tiny", messages=turns, tools=[TOOL])
    assert second.choices[0].message.content == "3"


def test_streamed_tools_through_the_clients_helper(
    engine: ScriptedEngine, api: openai.OpenAI
) -> None:
    engine.script = lambda prompt, index: f"<think>add them</think>{CALL}"
    with api.chat.completions.stream(model="tiny", messages=HI, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})


def test_structured_output_parses_into_a_model(engine: ScriptedEngine, api: openai.OpenAI) -> None:
    engine.script = lambda prompt, index: '{"name": "Paris", "people": 2}'
    answer = api.chat.completions.parse(model="tiny", messages=HI, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Paris", people=2)
    assert engine.requests[-1].grammar


def test_logprobs(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == "Hello, world!<eos>"
    assert content[0].top_logprobs[0].logprob == -0.5


def test_completions(api: openai.OpenAI) -> None:
    answer = api.completions.create(model="tiny", prompt=["a", "b"], max_tokens=50, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hello, world!"] * 2
    chunks = api.completions.create(model="tiny", prompt="a", max_tokens=50, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world!"


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").owned_by == "FastDeploy"


def test_extra_fields_go_through_extra_body(engine: ScriptedEngine, api: openai.OpenAI) -> None:
    api.chat.completions.create(model="tiny", messages=HI, extra_body={"top_k": 5})
    assert engine.requests[-1].sampling.top_k == 5


def test_errors_arrive_as_the_clients_own(engine: ScriptedEngine, api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="tiny", messages=HI, n=999)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")
    with pytest.raises(openai.AuthenticationError):
        api.with_options(api_key="wrong").models.list()
    engine.refuse = openai_queue_full()
    with pytest.raises(openai.RateLimitError):
        api.chat.completions.create(model="tiny", messages=HI)


def openai_queue_full() -> Exception:
    from fastdeploy_core.errors import QueueFull

    return QueueFull("full")


def test_a_stream_that_fails_raises_in_the_client(
    engine: ScriptedEngine, api: openai.OpenAI
) -> None:
    from fastdeploy_core.errors import WorkerError

    engine.fail = WorkerError("gone")
    with pytest.raises(openai.APIError, match="engine failed"):
        list(api.chat.completions.create(model="tiny", messages=HI, stream=True))
