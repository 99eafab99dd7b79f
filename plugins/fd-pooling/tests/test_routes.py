"""The routes over real servers, with the clients of today, unchanged."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cohere
import httpx
import numpy as np
import openai
import pytest
import torch
from fd_pooling.routes import pooling_routes
from pooling_models import CONVERSATION, PAIRS, QUERY, TEXTS
from server_process import ServerProcess, run

from fastdeploy_core.plugins.known import providers

Server = Callable[..., ServerProcess]
TOLERANCE = 1e-5


def test_every_route_is_known_to_servers_without_the_plugin() -> None:
    known = {route for route, name in providers("route").items() if name == "fd-pooling"}
    assert known == {f"POST {route.path}" for route in pooling_routes().router.routes}


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def close(ours: Any, theirs: Any) -> bool:
    return bool(np.abs(np.asarray(ours) - np.asarray(theirs)).max() <= TOLERANCE)


def test_the_openai_client_gets_embeddings_in_either_encoding(
    server: Server, answers: dict[str, Any]
) -> None:
    expected = answers["qwen3-embedding"]["texts"]
    with openai.OpenAI(base_url=server("qwen3-embedding").url + "/v1", api_key="x") as client:
        for form in (openai.omit, "float", "base64"):
            found = client.embeddings.create(
                model="qwen3-embedding", input=TEXTS, encoding_format=form
            )
            assert [each.index for each in found.data] == list(range(len(TEXTS)))
            assert found.to_dict()["id"]  # which Mistral's client wants
            vectors = [each.embedding for each in found.data]
            if form == "base64":  # the client leaves it as it is when it was asked for
                raw = [base64.b64decode(str(vector)) for vector in vectors]
                vectors = [np.frombuffer(data, "<f4").tolist() for data in raw]
            assert close(vectors, expected)
        one = client.embeddings.create(model="qwen3-embedding", input=TEXTS[0])
        assert close(one.data[0].embedding, expected[0])
        assert one.usage.prompt_tokens == one.usage.total_tokens > 1
        with pytest.raises(openai.BadRequestError, match="not trained for shorter"):
            client.embeddings.create(model="qwen3-embedding", input="x", dimensions=8)


def test_token_ids_are_inputs_too(server: Server, answers: dict[str, Any]) -> None:
    url = server("qwen3-embedding").url
    ids = [
        post(url, "/tokenize", {"prompt": text, "add_special_tokens": True}).json()["tokens"]
        for text in TEXTS
    ]
    found = post(url, "/v1/embeddings", {"input": ids}).json()["data"]
    assert close([each["embedding"] for each in found], answers["qwen3-embedding"]["texts"])
    found = post(url, "/pooling", {"input": ids[1]}).json()["data"]
    assert close(found[0]["data"], answers["qwen3-embedding"]["texts"][1])


def test_a_call_with_more_texts_than_there_are_places_is_answered_in_order(
    server: Server, answers: dict[str, Any]
) -> None:
    """1000 texts are what LangChain sends at a time."""
    url, expected = server("qwen3-embedding").url, answers["qwen3-embedding"]["texts"]
    order = [n % len(TEXTS) for n in range(1000)]
    found = post(url, "/v1/embeddings", {"input": [TEXTS[n] for n in order]}).json()["data"]
    assert close([each["embedding"] for each in found], [expected[n] for n in order])
    answer = post(url, "/v1/embeddings", {"input": ["x"] * 2049})
    assert answer.status_code == 400 and "at most 2048" in answer.text


def test_calls_at_the_same_time_do_not_mix(server: Server, answers: dict[str, Any]) -> None:
    url, expected = server("qwen3-embedding").url, answers["qwen3-embedding"]["texts"]
    wrong: list[int] = []

    def ask(number: int) -> None:
        found = post(url, "/v1/embeddings", {"input": TEXTS[number % 5]}).json()
        if not close(found["data"][0]["embedding"], expected[number % 5]):
            wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_embeddings_are_scored_by_their_cosine(server: Server, answers: dict[str, Any]) -> None:
    url, vectors = server("qwen3-embedding").url, np.array(answers["qwen3-embedding"]["texts"])
    found = post(url, "/score", {"queries": TEXTS[0], "documents": TEXTS[1:]}).json()["data"]
    assert close([each["score"] for each in found], vectors[1:] @ vectors[0])
    body = {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2}
    found = post(url, "/v1/rerank", body).json()["results"]
    best = np.argsort(-(vectors[1:] @ vectors[0]))[:2]
    assert [each["index"] for each in found] == best.tolist()


def test_invocations_is_the_route_that_the_body_is_of(server: Server) -> None:
    """As vLLM's servers answer SageMaker."""
    embeds, classes = server("qwen3-embedding").url, server("bert-cross").url
    for url, path, body in (
        (embeds, "/v1/embeddings", {"input": TEXTS}),
        (embeds, "/rerank", {"query": TEXTS[0], "documents": TEXTS, "unknown": 1}),
        (embeds, "/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
        (embeds, "/v2/embed", {"texts": TEXTS}),
        (classes, "/classify", {"input": TEXTS}),
    ):
        invoked, same = post(url, "/invocations", body), post(url, path, body)
        assert invoked.status_code == 200, invoked.text
        one, two = invoked.json(), same.json()
        assert one.keys() == two.keys()
        for rows in {"data", "results"} & one.keys():
            assert [row.keys() for row in one[rows]] == [row.keys() for row in two[rows]]
        ignored = [found.headers.get("x-ignored-fields") for found in (invoked, same)]
        assert ignored == (["unknown"] * 2 if "unknown" in body else [None] * 2)
    assert post(embeds, "/invocations", {"prompt": "Hi"}).status_code == 400


def test_the_cohere_clients_embed_and_rerank(server: Server, answers: dict[str, Any]) -> None:
    embeds, cross = server("qwen3-embedding").url, server("bert-cross").url
    client = cohere.ClientV2(api_key="x", base_url=embeds)
    found = client.embed(
        model="qwen3-embedding",
        texts=TEXTS,
        input_type="search_document",
        embedding_types=["float"],
    )
    assert close(found.embeddings.float_, answers["qwen3-embedding"]["texts"])
    older = cohere.Client("x", base_url=embeds)
    # In several calls, since the client sends 96 texts at a time.
    plain = older.embed(texts=TEXTS * 40, model="qwen3-embedding", input_type="search_document")
    assert plain.response_type == "embeddings_floats" and plain.texts == TEXTS * 40
    assert close(plain.embeddings, answers["qwen3-embedding"]["texts"] * 40)
    typed = older.embed(texts=TEXTS, embedding_types=["float", "binary"])
    assert typed.response_type == "embeddings_by_type"
    assert close(typed.embeddings.float_, answers["qwen3-embedding"]["texts"])
    given: Any = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    parts = client.embed(model="qwen3-embedding", inputs=given, input_type="search_document")
    assert close(parts.embeddings.float_, answers["qwen3-embedding"]["texts"])
    picture = {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
    wrongs: list[dict[str, Any]] = [{"images": ["data:image/png;base64,"]}, {"inputs": [picture]}]
    for wrong in wrongs:
        with pytest.raises(cohere.errors.BadRequestError, match=r"give texts|no text"):
            client.embed(model="qwen3-embedding", input_type="image", **wrong)
    scores = answers["bert-cross"]["pairs"]
    order = np.argsort(-np.array(scores)).tolist()
    newer, older = cohere.ClientV2(api_key="x", base_url=cross), cohere.Client("x", base_url=cross)
    asked: dict[str, Any] = {"model": "bert-cross", "query": QUERY, "documents": TEXTS, "top_n": 3}
    for ranked in (
        newer.rerank(**asked, max_tokens_per_doc=4096, priority=1),
        older.rerank(**asked, return_documents=False, max_chunks_per_doc=10),
    ):
        assert [each.index for each in ranked.results] == order[:3]
        expected = [scores[number] for number in order[:3]]
        assert close([each.relevance_score for each in ranked.results], expected)


def test_coheres_input_type_writes_the_prompt_of_that_name(
    server: Server, answers: dict[str, Any]
) -> None:
    url, expected = server("bert-mean").url, answers["bert-mean"]
    for kind, name in (("search_query", "query_texts"), ("search_document", "texts")):
        body = {"texts": TEXTS, "input_type": kind}
        found = post(url, "/v2/embed", body).json()["embeddings"]["float"]
        assert close(found, expected[name])


def test_numbers_come_in_the_type_and_byte_order_asked_for(
    server: Server, answers: dict[str, Any]
) -> None:
    url, expected = server("bert-mean").url, np.array(answers["bert-mean"]["texts"], np.float32)
    for dtype, order, torch_type in [
        ("float32", "big", torch.float32),
        ("float16", "little", torch.float16),
        ("bfloat16", "big", torch.bfloat16),
    ]:
        body = {"input": TEXTS, "encoding_format": "base64", "embed_dtype": dtype}
        found = post(url, "/v1/embeddings", {**body, "endianness": order}).json()["data"]
        sign = ">" if order == "big" else "<"
        for each, vector in zip(found, expected, strict=True):
            raw = np.frombuffer(
                base64.b64decode(each["embedding"]), f"{sign}u{torch_type.itemsize}"
            )
            theirs = torch.from_numpy(raw.astype(f"=i{torch_type.itemsize}")).view(torch_type)
            assert close(theirs.float().numpy(), torch.from_numpy(vector).to(torch_type).float())
    kinds = ["binary", "ubinary"]
    bits = post(url, "/v2/embed", {"texts": TEXTS, "embedding_types": kinds}).json()["embeddings"]
    unsigned = np.array(bits["ubinary"])
    assert (np.unpackbits(unsigned.astype(np.uint8), axis=1) == (expected >= 0)).all()
    assert (np.array(bits["binary"]) == unsigned - 128).all()


def test_a_task_that_is_not_the_models_is_refused(server: Server) -> None:
    url = server("bert-mean").url
    own = post(url, "/pooling", {"input": "a", "task": "embed"})
    assert own.json() | {"id": 0, "created": 0} == post(url, "/pooling", {"input": "a"}).json() | {
        "id": 0,
        "created": 0,
    }
    other = post(url, "/pooling", {"input": "a", "task": "token_embed"})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "task")


def test_pairs_are_named_and_cut_as_vllms_clients_do(server: Server) -> None:
    url = server("bert-cross").url

    def scores(**body: Any) -> list[float]:
        return [each["score"] for each in post(url, "/score", body).json()["data"]]

    plain = scores(queries=QUERY, documents=TEXTS)
    assert scores(queries=QUERY, items=TEXTS, max_tokens_per_query=0) == plain
    short = scores(queries=QUERY, items=TEXTS, max_tokens_per_query=1, max_tokens_per_doc=1)
    assert short != plain
    long = "x " * 5000
    assert post(url, "/score", {"queries": long, "documents": "b"}).status_code == 400
    cut = {"queries": long, "documents": "b", "max_tokens_per_query": 2}
    assert post(url, "/score", cut).status_code == 200
    twice = {"queries": QUERY, "documents": "a", "items": "b"}
    assert post(url, "/score", twice).status_code == 400


def test_a_conversation_may_end_openly_and_has_the_servers_template(server: Server) -> None:
    url = server("llama-reward", "--convert", "reward").url
    said = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    closed = post(url, "/v1/reward", {"messages": said}).json()["usage"]["prompt_tokens"]
    body = {"messages": said, "continue_final_message": True}
    assert post(url, "/v1/reward", body).json()["usage"]["prompt_tokens"] < closed
    for wrong in ({"add_generation_prompt": True}, {"chat_template": "{{ 1 }}"}):
        assert post(url, "/v1/reward", {**body, **wrong}).status_code == 400


def test_a_batch_file_is_answered(models: Path, tmp_path: Path, answers: dict[str, Any]) -> None:
    asked = [
        {"custom_id": str(n), "url": "/v1/embeddings", "method": "POST", "body": {"input": text}}
        for n, text in enumerate(TEXTS)
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in asked))
    options = ("--num-threads", "1", "--num-gpu-blocks-override", "64", "--dtype", "float32")
    done = run(
        "run-batch", "-i", str(source), "-o", str(target), str(models / "bert-mean"), *options
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line)["response"]["body"] for line in target.read_text().splitlines()]
    assert close([line["data"][0]["embedding"] for line in lines], answers["bert-mean"]["texts"])


def test_pairs_in_every_spelling(server: Server, answers: dict[str, Any]) -> None:
    url, expected = server("bert-cross").url, answers["bert-cross"]["pairs"]
    bodies = (
        {"queries": QUERY, "documents": TEXTS},
        {"text_1": QUERY, "text_2": TEXTS},
        {"queries": [query for query, _ in PAIRS], "documents": TEXTS},
        {"queries": [QUERY], "documents": [{"text": text} for text in TEXTS]},
    )
    for path in ("/score", "/v1/score"):
        for body in bodies:
            found = post(url, path, body).json()
            assert close([each["score"] for each in found["data"]], expected)
            assert [each["index"] for each in found["data"]] == list(range(len(TEXTS)))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = post(url, path, {"query": QUERY, "documents": TEXTS}).json()
        by_index = {each["index"]: each["relevance_score"] for each in found["results"]}
        assert close([by_index[n] for n in range(len(TEXTS))], expected)
        assert all(each["document"]["text"] == TEXTS[each["index"]] for each in found["results"])
        assert found["usage"]["total_tokens"] > 0
    found = post(url, "/classify", {"input": TEXTS[0]}).json()["data"][0]
    assert found["label"] == "LABEL_0" and found["num_classes"] == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"queries": ["a", "b"], "documents": ["a"]}, "no pairs"),
        ({"queries": "a"}, "needs queries and documents"),
        ({"queries": "a", "documents": []}, "no pairs"),
        ({"queries": "a", "documents": [{"image": "x"}]}, "no text"),
        ({"queries": "a", "documents": "b", "instruction": "c"}, "no instruction"),
        ({"queries": "a", "documents": "b c " * 500}, "at most 200"),
        ({"queries": "a", "documents": "b", "truncate_prompt_tokens": 201}, "at most 200"),
    ],
)
def test_a_bad_pair_is_refused(body: dict[str, Any], words: str, server: Server) -> None:
    answer = post(server("bert-cross").url, "/score", body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_a_pair_is_cut_as_tokenizers_cut_pairs(server: Server) -> None:
    url = server("bert-cross").url
    body = {"query": QUERY, "documents": ["b c " * 500], "truncate_prompt_tokens": -1}
    answer = post(url, "/rerank", body).json()
    assert answer["usage"]["total_tokens"] == 200
    body = {"query": QUERY, "documents": ["b c " * 500], "max_tokens_per_doc": 4}
    count = post(url, "/tokenize", {"prompt": QUERY}).json()["count"]
    assert post(url, "/rerank", body).json()["usage"]["total_tokens"] == count + 4 + 1


def test_rewards_of_texts_and_of_a_conversation(server: Server, answers: dict[str, Any]) -> None:
    url = server("llama-reward", "--convert", "reward").url
    expected = answers["llama-reward"]
    for path in ("/v1/reward", "/v1/chat/reward"):
        found = post(url, path, {"messages": CONVERSATION}).json()["data"]
        assert close(found[0]["score"], expected["conversation"])
    found = post(url, "/pooling", {"input": TEXTS}).json()["data"]
    assert close([each["data"] for each in found], expected["texts"])


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {}, "either input or messages"),
        ("/v1/embeddings", {"input": []}, "must not be empty"),
        ("/v1/embeddings", {"input": [[]]}, "must not be empty"),
        ("/v1/embeddings", {"input": [[1, -2]]}, "out of vocabulary"),
        ("/v1/embeddings", {"input": [1, 10**6]}, "out of vocabulary"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "nothing of the prompt"),
        ("/v1/embeddings", {"input": "yes " * 3000}, "takes at most 256"),
        ("/v1/embeddings", {"input": "x" * 10**6}, "characters"),
        ("/rerank", {"query": "yes " * 3000, "documents": ["x"]}, "query has 3002 tokens"),
        ("/rerank", {"query": "x", "documents": ["yes " * 3000]}, "documents has 3002 tokens"),
        ("/score", {"text_1": "yes " * 3000, "text_2": ["x", "y"]}, "queries has 3002 tokens"),
        ("/classify", {"input": "x"}, "for the task embed"),
        ("/v1/completions", {"prompt": "x"}, "generates no text"),
    ],
)
def test_what_cannot_be_answered_says_why(
    path: str, body: dict[str, Any], words: str, server: Server
) -> None:
    answer = post(server("qwen3-embedding").url, path, body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
