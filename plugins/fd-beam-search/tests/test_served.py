"""Beam search over the API, as OpenAI's client asks for it with vLLM's fields."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from oracle import ask

from fastdeploy import LLM
from tests.server_process import REPOSITORY, ServerProcess, serving

DEMO = REPOSITORY / "models" / "ernie-tiny"
QUESTION = "Where is the capital of China?"
STOPS = [4, 2]  # of its generation_config.json
BEAMS = {"use_beam_search": True}


@pytest.fixture(scope="module")
def server(fd_tensor: str) -> Iterator[ServerProcess]:
    with serving(DEMO, "--dtype", "float32", "--tensor-library", fd_tensor) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _asked(**more: Any) -> dict[str, Any]:
    return {"model": DEMO.name, "max_tokens": 10, "temperature": 0, **more}


def test_completions_are_those_of_transformers(client: openai.OpenAI) -> None:
    prompt = (
        client.completions.create(
            prompt="The capital of China is", **_asked(extra_body={"return_token_ids": True})
        )
        .choices[0]
        .prompt_token_ids
    )
    case = {
        "prompt": prompt, "width": 5, "max_tokens": 10, "length_penalty": 0.5,
        "early_stopping": False, "stop_ids": STOPS,
    }  # fmt: skip
    (wanted,) = ask(DEMO, [case])
    body = {**BEAMS, "best_of": 5, "length_penalty": 0.5, "return_token_ids": True}
    answer = client.completions.create(prompt=prompt, n=3, logprobs=2, **_asked(extra_body=body))
    assert [c.index for c in answer.choices] == [0, 1, 2]
    for choice, (tokens, score) in zip(answer.choices, wanted, strict=False):
        assert choice.token_ids == tokens
        assert choice.finish_reason == ("stop" if tokens[-1] in STOPS else "length")
        total = sum(choice.logprobs.token_logprobs)
        assert total / len(tokens) ** 0.5 == pytest.approx(score, abs=1e-4)
        assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in answer.choices)


def test_several_prompts_echo_and_prompt_logprobs(client: openai.OpenAI) -> None:
    prompts = ["The capital of China is", "A star is"]
    extra = {**BEAMS, "prompt_logprobs": 0}
    answer = client.completions.create(prompt=prompts, n=2, echo=True, **_asked(extra_body=extra))
    texts = [choice.text for choice in answer.choices]
    assert [text.startswith(prompts[i // 2]) for i, text in enumerate(texts)] == [True] * 4
    assert len(set(texts)) == 4
    assert all(c.prompt_logprobs[1] for c in answer.choices)


def test_chat(client: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": QUESTION}]
    more = _asked(extra_body=BEAMS) | {"max_tokens": 24}
    answer = client.chat.completions.create(
        messages=asked, n=3, logprobs=True, top_logprobs=1, **more
    )
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3 and "Beijing" in texts[0]
    means = [
        sum(t.logprob for t in c.logprobs.content) / len(c.logprobs.content) for c in answer.choices
    ]
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"stream": True}, "cannot be streamed"),
        ({"stop": ["a"]}, "stop strings"),
        ({"frequency_penalty": 0.5}, "penalties"),
        ({"extra_body": {**BEAMS, "structured_outputs": {"regex": "a+"}}}, "structured output"),
        ({"extra_body": {**BEAMS, "length_penalty": 1e9}}, "length_penalty"),
        ({"extra_body": {"length_penalty": 2.0}}, "set use_beam_search"),
        ({"extra_body": {**BEAMS, "early_stopping": "maybe"}}, "early_stopping"),
        ({"n": 16, "extra_body": {**BEAMS, "best_of": 64}}, "--max-logprobs"),
    ],
)
def test_what_cannot_be(client: openai.OpenAI, more: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.completions.create(prompt="a", **_asked(**{"extra_body": BEAMS, **more}))


def test_who_leaves_leaves_nothing_behind(server: ServerProcess) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=0.3
        ) as gone:
            with pytest.raises(openai.APITimeoutError):
                await gone.completions.create(
                    prompt="The capital of China is",
                    n=8,
                    **{**_asked(), "max_tokens": 400},
                    extra_body={**BEAMS, "ignore_eos": True},
                )

    asyncio.run(leave())
    _wait_until_idle(server)


def _wait_until_idle(server: ServerProcess) -> None:
    import time

    import httpx

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        running = [x for x in lines if "num_requests_running" in x and not x.startswith("#")]
        assert running
        if all(float(line.rsplit(" ", 1)[1]) == 0 for line in running):
            return
        time.sleep(0.05)
    raise AssertionError(running)


def test_the_offline_search_says_the_same(client: openai.OpenAI, fd_tensor: str) -> None:
    from fd_beam_search import BeamSearchParams

    answer = client.completions.create(
        prompt="The capital of China is", n=4, **_asked(extra_body=BEAMS)
    )
    with LLM(DEMO, dtype="float32", tensor_library=fd_tensor, max_model_len=256) as llm:
        (found,) = llm.beam_search(
            "The capital of China is", BeamSearchParams(beam_width=4, max_tokens=10)
        )
    texts = ["The capital of China is" + choice.text for choice in answer.choices]
    decoded = [sequence.text.removeprefix("<s>") for sequence in found.sequences]
    assert [text.strip() for text in decoded] == [text.strip() for text in texts]
