"""Fields beyond OpenAI's: each does what the page says, is refused, or is known to have no
effect."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from fastdeploy_core.serving.openai.schemas.chat import ChatCompletionRequest
from fastdeploy_core.serving.openai.schemas.completion import CompletionRequest
from fastdeploy_core.serving.openai.schemas.tools import DetokenizeRequest, TokenizeRequest
from fastdeploy_core.serving.openai.schemas.unsupported import NO_EFFECT, REFUSED
from fastdeploy_core.tokenizer import Tokenizer
from tests.server_support import ScriptedEngine, events_of, live

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    TEXT: {"prompt": "Hi"},
}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api.md"


def page_fields(title: str) -> set[str]:
    """Names in the first column of the tables below a heading."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_page_lists_exactly_the_fields_there_are() -> None:
    shared = page_fields("Request fields: chat and completions")
    chat, text = page_fields("Request fields: chat"), page_fields("Request fields: completions")
    assert shared | chat == set(ChatCompletionRequest.model_fields) - set(NO_EFFECT)
    assert shared | text == set(CompletionRequest.model_fields) - set(NO_EFFECT)
    assert page_fields("Accepted without effect") == set(NO_EFFECT)
    assert page_fields("Refused") == set(REFUSED)
    assert page_fields("Tokenize") == set(TokenizeRequest.model_fields)
    assert page_fields("Detokenize") == set(DetokenizeRequest.model_fields)


def test_the_page_lists_exactly_the_routes_there_are(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    listed = re.findall(
        r"^\| `(GET|POST) (/[^` ]*)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    with live(engine, tokenizer, admin_key="operator") as server:
        paths = server.app.openapi()["paths"]
    there = {(m.upper(), path) for path, entry in paths.items() for m in entry}
    assert set(listed) == there | {("GET", "/openapi.json")}


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_supported_is_refused_with_a_reason(
    client: httpx.Client, route: str, name: str
) -> None:
    value = False if name == "include_logprobs_decode_token" else "something"
    response = client.post(route, json={**BODIES[route], name: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == name
    assert REFUSED[name].split(";")[0] in error["message"]


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_asking_for_what_happens_anyway_is_fine(client: httpx.Client, route: str) -> None:
    anyway = {
        "include_logprobs_decode_token": True,
        "length_penalty": 1.0,
        "modalities": ["text"],
        "verbosity": "medium",
        "use_beam_search": False,
        "kv_transfer_params": None,
        "collect_metrics": False,
        "mm_hashes": [],
    }
    response = client.post(route, json={**BODIES[route], **anyway})
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_fields_of_openais_clients_do_no_harm(client: httpx.Client, route: str) -> None:
    fields = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    fields |= {"safety_identifier": "x", "prompt_cache_key": "k", "prompt_cache_retention": "24h"}
    fields |= {"guided_decoding_backend": "xgrammar", "session_id": "s"}
    fields["prediction"] = {"type": "content", "content": "x"}
    assert set(fields) == set(NO_EFFECT)
    response = client.post(route, json={**BODIES[route], **fields})
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_unknown_fields_are_named_in_a_header(client: httpx.Client, route: str) -> None:
    body = {**BODIES[route], "max_token": 3, "b\r\nx: 1": 2}
    response = client.post(route, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"] == "?, max_token"
    with client.stream("POST", route, json={**body, "stream": True}) as stream:
        assert stream.headers["x-ignored-fields"] == "?, max_token"
        stream.read()
    assert "x-ignored-fields" not in client.post(route, json=BODIES[route]).headers


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        {"stream": True, "stream_options": {"usage": True}},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"truncate_prompt_tokens": 513},
        {"truncation_side": "middle", "truncate_prompt_tokens": 3},
        {"stream_interval": 0},
        {"max_streaming_response_tokens": 0},
        {"request_id": "a b"},
        {"request_id": "x" * 129},
    ],
)
@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_values_that_mean_nothing_are_refused(
    client: httpx.Client, route: str, fields: dict
) -> None:
    assert client.post(route, json={**BODIES[route], **fields}).status_code == 400


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_a_whole_number_may_be_written_with_a_point(
    engine: ScriptedEngine, client: httpx.Client, route: str
) -> None:
    fields = {"max_tokens": 9.0, "top_k": 20.0, "seed": 5.0, "n": 1.0, "temperature": 1.0}
    response = client.post(route, json={**BODIES[route], **fields})
    assert response.status_code == 200, response.text
    sampling = engine.requests[-1].sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (9, 20, 5)
    for wrong in (9.5, 1e300, "9"):
        response = client.post(route, json={**BODIES[route], "max_tokens": wrong})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "max_tokens"


def test_a_prompt_is_cut_to_its_last_tokens(
    engine: ScriptedEngine, tokenizer: Tokenizer, client: httpx.Client
) -> None:
    def seen(route: str, **fields: object) -> str:
        response = client.post(route, json={**BODIES[route], **fields})
        assert response.status_code == 200, response.text
        request = engine.requests[-1]
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == len(request.prompt_token_ids)
        return tokenizer.decode(request.prompt_token_ids)

    assert seen(TEXT, prompt="abcdef", truncate_prompt_tokens=4) == "cdef"
    assert seen(TEXT, prompt="abc", truncate_prompt_tokens=4) == "abc"
    cut = {"truncate_prompt_tokens": 4, "truncation_side": "right"}
    assert seen(TEXT, prompt="abcdef", **cut) == "abcd"
    assert seen(TEXT, prompt=tokenizer.encode("abcdef"), truncate_prompt_tokens=2) == "ef"
    assert seen(CHAT, truncate_prompt_tokens=2) == "i<|assistant|>"
    # To the maximum: what the context of 512 tokens holds beside the answer.
    long = "x" * 600 + "end"
    assert client.post(TEXT, json={"prompt": long}).status_code == 400
    kept = seen(TEXT, prompt=long, truncate_prompt_tokens=-1, max_tokens=12)
    assert len(kept) == 500
    assert kept.endswith("xend")


def test_an_echo_is_of_what_the_model_saw(client: httpx.Client) -> None:
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 3, "echo": True}
    assert client.post(TEXT, json=body).json()["choices"][0]["text"] == "defHello, world!"


@pytest.mark.parametrize("field", ["stream_interval", "max_streaming_response_tokens"])
@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_a_stream_can_be_sent_in_larger_chunks(
    client: httpx.Client, route: str, field: str
) -> None:
    def sizes(**fields: object) -> tuple[list[int], str]:
        body = {**BODIES[route], "stream": True, "return_token_ids": True, **fields}
        with client.stream("POST", route, json=body) as response:
            choices = [chunk["choices"][0] for chunk in events_of(response)]
        text = "".join(c.get("text", "") + c.get("delta", {}).get("content", "") for c in choices)
        assert choices[-1]["finish_reason"] == "stop"
        return [len(c["token_ids"]) for c in choices if c.get("token_ids")], text

    num_tokens = len("Hello, world!") + 1
    assert sizes() == ([1] * num_tokens, "Hello, world!")
    assert sizes(**{field: 5}) == ([1, 5, 5, 3], "Hello, world!")
    assert sizes(**{field: 100}) == ([1, 13], "Hello, world!")


def test_an_operator_sets_the_chunks_of_requests_that_do_not_say(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    with (
        live(engine, tokenizer, stream_interval=5) as server,
        httpx.Client(base_url=server.url) as own,
    ):
        for fields, sizes in (({}, [1, 5, 5, 3]), ({"stream_interval": 1}, [1] * 14)):
            body = {**BODIES[TEXT], "stream": True, "return_token_ids": True, **fields}
            with own.stream("POST", TEXT, json=body) as response:
                chunks = [c["choices"][0]["token_ids"] for c in events_of(response)]
            assert [len(ids) for ids in chunks] == sizes


def test_each_choice_has_chunks_of_its_own(engine: ScriptedEngine, client: httpx.Client) -> None:
    engine.script = lambda prompt, index: "abcdef" * (index + 1)
    body = {**BODIES[TEXT], "n": 2, "stream": True, "stream_interval": 4, "logprobs": 1}
    texts, tokens = {0: "", 1: ""}, {0: 0, 1: 0}
    with client.stream("POST", TEXT, json=body) as response:
        for chunk in events_of(response):
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert texts == {0: "abcdef", 1: "abcdef" * 2}
    assert tokens == {0: 7, 1: 13}


def test_tokens_that_wait_are_sent_before_an_error(
    engine: ScriptedEngine, client: httpx.Client
) -> None:
    from fastdeploy_core.errors import WorkerError

    engine.fail = WorkerError("gone")
    body = {**BODIES[TEXT], "stream": True, "stream_interval": 50}
    with client.stream("POST", TEXT, json=body) as response:
        *chunks, last = events_of(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "He"
    assert last["error"]["code"] == 503


def test_a_request_id_names_the_answer_and_nothing_else(
    engine: ScriptedEngine, client: httpx.Client
) -> None:
    for given in ("mine-1", "chatcmpl-mine-1"):
        body = client.post(CHAT, json={**BODIES[CHAT], "request_id": given}).json()
        assert body["id"] == "chatcmpl-mine-1"
    body = client.post(TEXT, json={**BODIES[TEXT], "request_id": "mine-1"}).json()
    assert body["id"] == "cmpl-mine-1"
    assert "mine-1" not in {request.request_id for request in engine.requests}


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_times_of_one_answer_are_told_where_the_operator_wants(
    engine: ScriptedEngine, tokenizer: Tokenizer, client: httpx.Client, route: str
) -> None:
    names = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"}
    body = {**BODIES[route], "max_tokens": 3}
    assert "metrics" not in client.post(route, json=body).json()
    shown = {"stream": True, "stream_options": {"include_usage": True}}
    with (
        live(engine, tokenizer, enable_per_request_metrics=True) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        whole = http.post(route, json=body).json()
        chunks = events_of(http.post(route, json={**body, **shown}))
        two = http.post(route, json={**body, "n": 2, "temperature": 1}).json()
        short = http.post(route, json={**body, "max_tokens": 1}).json()["metrics"]
        if route == TEXT:
            both = http.post(route, json={**body, "prompt": ["Hi", "Ho"]}).json()
            assert "metrics" not in both
    metrics = whole["metrics"]
    assert set(metrics) == set(chunks[-1]["metrics"]) == {*names, "tokens_per_second"}
    assert metrics["generation_time_ms"] == pytest.approx(2 * metrics["mean_itl_ms"])
    assert metrics["time_to_first_token_ms"] >= 0
    assert short["mean_itl_ms"] is None and short["generation_time_ms"] == 0
    assert not any("metrics" in chunk for chunk in chunks[:-1]) and "metrics" not in two


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_arguments_of_logits_processors_have_vllms_name_too(
    client: httpx.Client, engine: ScriptedEngine, route: str
) -> None:
    both = {"vllm_xargs": {"a": 1, "b": 1}, "logits_processors_args": {"b": 2}}
    response = client.post(route, json={**BODIES[route], **both})
    assert response.status_code == 200, response.text
    assert engine.requests[-1].sampling.logits_processors_args == {"a": 1, "b": 2}
