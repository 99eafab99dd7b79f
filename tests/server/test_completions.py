"""Text completions: prompt shapes, echo, best_of, logprobs, streaming equal to not streaming."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from msgspec import structs

from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_core.types import Request, RequestOutputDelta, TokenLogprobs
from tests.server_support import ScriptedEngine, events_of


def complete(client: httpx.Client, **fields: object) -> dict:
    response = client.post("/v1/completions", json={"model": "tiny", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, **fields: object) -> list[dict]:
    body = {"model": "tiny", "stream": True, **fields}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        return events_of(response)


def texts(chunks: list[dict]) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


@pytest.fixture(autouse=True)
def mirror(engine: ScriptedEngine) -> None:
    engine.script = lambda prompt, index: f"<{prompt}>{index}"


def test_an_answer_has_the_shape_clients_expect(client: httpx.Client) -> None:
    body = complete(client, prompt="abc", max_tokens=30)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "text": "<abc>0",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "prompt_logprobs": None,
    }
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 7


def test_sixteen_tokens_are_the_default(engine: ScriptedEngine, client: httpx.Client) -> None:
    complete(client, prompt="abc")
    assert engine.requests[-1].sampling.max_tokens == 16
    complete(client, prompt="abc", max_tokens=None)  # as in vLLM; OpenAI's is nullable, too
    assert engine.requests[-1].sampling.max_tokens == 16


def test_prompts_come_in_four_shapes(tokenizer: Tokenizer, client: httpx.Client) -> None:
    ids = tokenizer.encode("ab", False)
    for prompt, expected in [
        ("ab", ["<ab>0"]),
        (["ab", "c"], ["<ab>0", "<c>0"]),
        (ids, ["<ab>0"]),
        ([ids, ids[:1]], ["<ab>0", "<a>0"]),
        ([ids, "c"], ["<ab>0", "<c>0"]),
    ]:
        body = complete(client, prompt=prompt)
        assert [c["text"] for c in body["choices"]] == expected
        assert [c["index"] for c in body["choices"]] == list(range(len(expected)))


def test_choices_are_ordered_by_prompt_then_n(client: httpx.Client) -> None:
    body = complete(client, prompt=["a", "b"], n=2)
    expected = ["<a>0", "<a>1", "<b>0", "<b>1"]
    assert [c["text"] for c in body["choices"]] == expected
    assert texts(stream(client, prompt=["a", "b"], n=2)) == dict(enumerate(expected))


def test_usage_of_many_prompts_is_their_sum(client: httpx.Client) -> None:
    *_, last = stream(client, prompt=["a", "bcd"], stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == complete(client, prompt=["a", "bcd"])["usage"]
    assert last["usage"]["prompt_tokens"] == 4


def test_echo_puts_the_prompt_in_front(client: httpx.Client) -> None:
    assert complete(client, prompt="abc", echo=True)["choices"][0]["text"] == "abc<abc>0"
    assert texts(stream(client, prompt="abc", echo=True)) == {0: "abc<abc>0"}


def test_echo_with_no_tokens_scores_the_prompt(client: httpx.Client) -> None:
    body = complete(client, prompt="abc", echo=True, max_tokens=0, logprobs=1)
    (choice,) = body["choices"]
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 0


def test_logprobs_have_offsets_that_go_on_over_a_stream(client: httpx.Client) -> None:
    whole = complete(client, prompt="a", logprobs=2)["choices"][0]["logprobs"]
    assert whole["tokens"] == [*"<a>0", "<eos>"]
    assert whole["text_offset"] == [0, 1, 2, 3, 4]
    assert all(len(top) == 2 for top in whole["top_logprobs"])
    parts: dict[str, list] = {name: [] for name in whole}
    for chunk in stream(client, prompt="a", logprobs=2):
        logprobs = chunk["choices"][0]["logprobs"]
        for name in parts:
            parts[name] += logprobs[name] if logprobs else []
    assert parts == whole


def test_each_choice_of_a_stream_echoes_the_prompt_with_its_logprobs(
    engine: ScriptedEngine, client: httpx.Client
) -> None:
    usual = engine._deltas

    async def one_by_one(request: Request) -> AsyncIterator[RequestOutputDelta]:
        position = 0
        async for delta in usual(request):
            for part in delta.sequences:
                last = delta.finished and part is delta.sequences[-1]
                logprobs = delta.prompt_logprobs if position == 0 else None
                changes = {"sequences": [part], "prompt_logprobs": logprobs, "finished": last}
                yield structs.replace(delta, position=position, **changes)
                position += 1

    engine._deltas = one_by_one  # type: ignore[method-assign]
    asked = {"prompt": "ab", "echo": True, "logprobs": 1, "n": 2, "temperature": 1.0}
    whole = {c["index"]: c["logprobs"] for c in complete(client, **asked)["choices"]}
    parts: dict[int, dict] = {index: {} for index in whole}
    for chunk in stream(client, **asked):
        (choice,) = chunk["choices"]
        for name, values in (choice["logprobs"] or {}).items():
            parts[choice["index"]].setdefault(name, []).extend(values)
    assert parts == whole


def test_tokens_of_logprobs_can_be_ids(client: httpx.Client) -> None:
    body = complete(client, prompt="a", logprobs=0, return_tokens_as_token_ids=True)
    logprobs = body["choices"][0]["logprobs"]
    assert all(token.startswith("token_id:") for token in logprobs["tokens"])
    names = [list(top) for top in logprobs["top_logprobs"]]
    assert names == [[token] for token in logprobs["tokens"]]


def test_tokens_may_be_named_whose_logprobs_are_wanted(
    engine: ScriptedEngine, client: httpx.Client
) -> None:
    complete(client, prompt="a", logprobs=0, logprob_token_ids=[3, 4])
    assert engine.requests[-1].sampling.logprob_token_ids == [3, 4]
    for fields in ({}, {"logprobs": 1, "max_tokens": 0, "echo": True}):
        answer = client.post(
            "/v1/completions", json={"prompt": "a", "logprob_token_ids": [3], **fields}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "logprob_token_ids"


def test_the_token_itself_comes_before_better_ones(
    engine: ScriptedEngine, client: httpx.Client
) -> None:
    usual = engine._logprobs

    def unlikely(token: int, count: int) -> TokenLogprobs:
        entry = usual(token, count + 1)
        return TokenLogprobs(entry.token_ids, [-9.0, *entry.logprobs[1:]], 7)

    engine._logprobs = unlikely  # type: ignore[method-assign]
    for fields in ({}, {"echo": True}, {"echo": True, "max_tokens": 0}):
        body = complete(client, prompt="ab", logprobs=1, **fields)
        logprobs = body["choices"][0]["logprobs"]
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            assert top is None or (len(top) == 2 and next(iter(top)) == token)


def test_prompt_logprobs_may_be_true(engine: ScriptedEngine, client: httpx.Client) -> None:
    complete(client, prompt="ab", prompt_logprobs=True)
    assert engine.requests[-1].sampling.prompt_logprobs == 1
    complete(client, prompt="ab", prompt_logprobs=False)
    assert engine.requests[-1].sampling.prompt_logprobs is None


def test_prompt_logprobs_are_given_as_vllm_does(client: httpx.Client) -> None:
    choice = complete(client, prompt="ab", prompt_logprobs=1)["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    ((entry),) = second.values()
    assert entry == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}


def test_best_of_keeps_the_most_likely(engine: ScriptedEngine, client: httpx.Client) -> None:
    likely = engine._logprobs

    def by_choice(token: int, count: int) -> object:
        entry = likely(token, count)
        return type(entry)(entry.token_ids, [-float(token), *entry.logprobs[1:]], 1)

    engine._logprobs = by_choice  # type: ignore[method-assign]
    engine.script = lambda prompt, index: "zya"[index]  # "a" has the smallest id of the three
    body = complete(client, prompt="p", best_of=3, n=1)
    assert [c["text"] for c in body["choices"]] == ["a"]
    assert body["choices"][0]["logprobs"] is None
    assert engine.requests[-1].sampling.n == 3


def test_token_ids_are_returned(tokenizer: Tokenizer, client: httpx.Client) -> None:
    choice = complete(client, prompt="ab", return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == tokenizer.encode("ab", False)
    assert tokenizer.decode(choice["token_ids"], True) == "<ab>0"
    chunks = stream(client, prompt="ab", return_token_ids=True)
    assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == choice["token_ids"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 513}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "n": 2, "temperature": 0}, "n"),
        ({"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]}, "structured_outputs"),
    ],
)
def test_what_cannot_be_served_is_refused_by_field(
    client: httpx.Client, fields: dict, param: str
) -> None:
    response = client.post("/v1/completions", json=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_one_prompt_too_long_refuses_the_call_and_leaves_nothing_behind(
    engine: ScriptedEngine, client: httpx.Client
) -> None:
    response = client.post("/v1/completions", json={"prompt": ["ok", "x" * 600]})
    assert response.status_code == 400
    assert engine.requests == []
    assert client.get("/load").json() == {"server_load": 0}
