"""Prefill and decode apart: real servers with roles hand prompts to each other, over shared memory
and over TCP. What goes wrong on the way: test_prefill_faults.py and test_prefill_networks.py."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import tokenizers
from checkpoints import build
from conftest import Router
from roles import (
    BLOCK_SIZE,
    SECRET,
    TEXT,
    Apart,
    ask,
    check_idle,
    metric,
    said,
    server,
    taken,
    text_body,
)
from server_process import CommandProcess
from server_support import wait_for

CHAT = "/v1/chat/completions"
FOUND = "prefix_cpu_cache_token_num_total"  # tokens whose blocks were taken from the host tier
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["shm", "tcp"])
def apart(request: pytest.FixtureRequest) -> Iterator[Apart]:
    """Tests leave all three alive."""
    made = Apart("--kv-transport", request.param)
    yield made
    made.stop()


@pytest.fixture(params=["shm", "tcp"])
def own(request: pytest.FixtureRequest) -> Iterator[Apart]:
    """Processes of a test's own, which it may harm."""
    made = Apart("--kv-transport", request.param)
    yield made
    made.stop()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, {}),
    "seeded": (TEXT, {"temperature": 1.0, "seed": 3}),
    "several": (TEXT, {"temperature": 1.0, "seed": 5, "n": 3}),
    "logprobs": (TEXT, {"logprobs": 3}),
    "penalties": (TEXT, {"repetition_penalty": 1.3, "presence_penalty": 0.5}),
    "one": (TEXT, {"max_tokens": 1}),
    "chat": (CHAT, {"max_completion_tokens": 9, "logprobs": True}),
    "json": (
        CHAT,
        {
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": PERSON},
            },
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_answer_is_one_instances_and_its_prompt_came_from_the_other(
    apart: Apart, case: str
) -> None:
    path, fields = CASES[case]
    body = text_body(case, **fields)
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    before, found_before = taken(apart.decode), metric(apart.decode, FOUND)
    answer = ask(apart.router.url, path, body)
    wait_for(lambda: taken(apart.decode) == before + 1, "the handover's end")
    # All whole blocks before the last token, less what templates have in common. An answer of one
    # token has needed none.
    num_prompt = answer["usage"]["prompt_tokens"]
    whole = (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
    num_found = metric(apart.decode, FOUND) - found_before
    most = whole if case != "one" else 0
    assert num_prompt > 128 and most - 64 < num_found <= most
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == whole if case == "several" else cached < 64, "as where it was computed"
    assert said(ask(apart.prefill.url, path, body)) == said(answer)


def test_a_stream_says_the_same(apart: Apart) -> None:
    body, text = text_body("stream"), ""
    with httpx.stream(
        "POST", apart.router.url + TEXT, json={**body, "stream": True}, timeout=60
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        text += "".join(choice["text"] for choice in json.loads(line)["choices"])
    assert text == ask(apart.prefill.url, TEXT, body)["choices"][0]["text"]


def test_many_at_once_and_some_who_leave(apart: Apart) -> None:
    bodies = [text_body(f"many {number}", 3 + number) for number in range(10)]

    def leave(body: dict[str, Any]) -> None:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(apart.router.url + TEXT, json={**body, "max_tokens": 400}, timeout=0.15)

    with ThreadPoolExecutor(10) as threads:
        left = [threads.submit(leave, text_body(f"leaves {n}", 20)) for n in range(5)]
        answers = list(threads.map(lambda body: ask(apart.router.url, TEXT, body), bodies))
        for future in left:
            future.exception()
    check_idle(apart.prefill, apart.decode)
    for body, answer in zip(bodies, answers, strict=True):
        assert said(ask(apart.prefill.url, TEXT, body)) == said(answer)


def test_clients_give_no_orders_through_a_router(apart: Apart) -> None:
    headers = {"X-KV-Handover": "prefill " + "0" * 32}
    url = apart.router.url + TEXT
    answer = httpx.post(url, json=text_body("order", 1), headers=headers, timeout=60).json()
    assert answer["usage"]["completion_tokens"] > 1


def test_a_stranger_without_the_secret_changes_no_role(apart: Apart) -> None:
    url = apart.prefill.url + "/kv_handover"
    assert httpx.post(url, json={"role": "decode"}).status_code == 403
    assert httpx.post(url, json={"role": "king"}).status_code in (400, 422)
    assert httpx.get(url).json()["role"] == "prefill"


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_any_number_of_ranks_hands_over_to_any(
    transport: str, num_prefill: int, num_decode: int
) -> None:
    """Heads that the ranks of one divide in another way than those of the other."""
    ranks = {"prefill": str(num_prefill), "decode": str(num_decode)}
    two = Apart(
        "--kv-transport",
        transport,
        each={role: ("--tensor-parallel-size", count) for role, count in ranks.items()},
    )
    try:
        for number in range(3):
            body = text_body(f"ranks {number}", 12 + 8 * number)
            answer = ask(two.router.url, TEXT, body)
            assert taken(two.decode) == number + 1
            assert said(ask(two.prefill.url, TEXT, body)) == said(answer)
        check_idle(two.prefill, two.decode)
    finally:
        two.stop()


def test_the_drafters_keys_and_values_come_along() -> None:
    """Of MTP, whose layer is one more of the blocks that are handed over: as many of its drafts are
    right as where it saw the prompt itself. Only the first step after a handed-over token has no
    draft."""
    mtp = '{"method": "mtp", "num_speculative_tokens": 1, "adaptive_length": false}'
    two = Apart("--kv-transport", "shm", "--speculative-config", mtp)

    def count(process: CommandProcess, body: dict[str, Any], url: str) -> tuple[Any, float, float]:
        names = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
        before = [metric(process, name) for name in names]
        words = said(ask(url, TEXT, body))
        drafted, right = (metric(process, n) - old for n, old in zip(names, before, strict=True))
        return words, drafted, right

    try:
        for number in range(3):
            body = text_body(f"draft {number + 2}", 16 + 5 * number, max_tokens=40)
            words, drafted, right = count(two.decode, body, two.router.url)
            assert taken(two.decode) == number + 1
            assert (words, right) == count(two.prefill, body, two.prefill.url)[::2]
            assert drafted > right > 0
    finally:
        two.stop()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("variant", ["gpt-oss", "gemma3", "llama4", "qwen3-next", "lfm2"])
def test_what_each_group_of_layers_needs_comes_along(
    tmp_path: Path, variant: str, transport: str
) -> None:
    """Of models with windows, chunks or states: blocks are taken over, and answers are those of one
    instance, to the same words again as well."""
    model = build(tmp_path, [variant]) / variant
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = tokenizers.models.WordLevel({f"w{n}": n for n in range(size)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(model / "tokenizer.json"))
    two, random = Apart("--kv-transport", transport, model=model), Random(3)
    prompts = [[random.randrange(5, size) for _ in range(length)] for length in (100, 145, 201)]
    prompts.append(prompts[1] + prompts[0][:90])
    try:
        for number, prompt in enumerate(prompts):
            body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
            answer = ask(two.router.url, TEXT, body)
            wait_for(lambda n=number: taken(two.decode) == n + 1, "the handover's end")
            alone = ask(two.prefill.url, TEXT, body)
            assert [c["token_ids"] for c in answer["choices"]] == [
                c["token_ids"] for c in alone["choices"]
            ]
        assert metric(two.decode, FOUND) > 100
        assert metric(two.decode, "kv_handover_failures_total") == 0
        check_idle(two.prefill, two.decode)
    finally:
        two.stop()


def test_roles_change_under_load(own: Apart) -> None:
    """Both ways; no request fails, and answers are right."""
    stop, failed, num_done = threading.Event(), list[str](), [0]

    def load(number: int) -> None:
        while not stop.is_set():
            num_done[0] += 1
            body = text_body(f"load {number} {num_done[0]}", 5)
            answer = httpx.post(own.router.url + TEXT, json=body, timeout=60)
            if answer.status_code != 200:
                failed.append(answer.text)

    def switch(process: CommandProcess, role: str) -> None:
        headers = {"X-KV-Secret": SECRET}
        url = process.url + "/kv_handover"
        answer = httpx.post(url, json={"role": role}, headers=headers, timeout=60)
        assert answer.status_code == 200 and answer.json()["role"] == role, answer.text

    with ThreadPoolExecutor(3) as threads:
        for number in range(3):
            threads.submit(load, number)
        try:
            for first, second in (("decode", "prefill"), ("prefill", "decode")):
                switch(own.prefill, first)
                switch(own.decode, second)
                before = num_done[0]
                wait_for(lambda at=before: num_done[0] > at + 6, "more answers", 60)
        finally:
            stop.set()
    assert not failed
    assert taken(own.prefill) > 0, "it took prompts while it was the decode instance"
    check_idle(own.prefill, own.decode)
    body = text_body("in the end")
    assert said(ask(own.router.url, TEXT, body)) == said(ask(own.prefill.url, TEXT, body))


def test_roles_follow_the_traffic() -> None:
    """`--slo-tpot`: two decode instances, prompts come, and one of them becomes a prefill instance;
    answers come, and it becomes one that answers. No request fails."""
    servers = [server("decode"), server("decode")]
    router = Router(
        [one.url for one in servers],
        *("--prefill-min-tokens", "64", "--slo-tpot", "0.004"),
        *("--role-interval", "1", "--role-dwell", "2"),
        extra={"FD_KV_SECRET": SECRET},
    ).until_ready(2)
    stop, failed = threading.Event(), list[str]()

    def load(number: int, **fields: Any) -> None:
        for turn in itertools.count():
            if stop.is_set():
                return
            body = {**text_body(f"traffic {number} {turn}", 12), **fields}
            answer = httpx.post(router.url + TEXT, json=body, timeout=60)
            if answer.status_code != 200:
                failed.append(answer.text)

    def until(roles: list[str], **fields: Any) -> None:
        stop.clear()
        with ThreadPoolExecutor(8) as threads:  # as many as run at once: a slow machine has
            for number in range(8):  # enough to write for more than one instance
                threads.submit(load, number, **fields)
            try:
                wait_for(lambda: sorted(router.listed("role").values()) == roles, f"{roles}", 60)
            finally:
                stop.set()

    try:
        until(["decode", "prefill"], max_tokens=1)
        until(["decode", "decode"], prompt="Go on", max_tokens=200, ignore_eos=True)
        assert not failed
        changes = [line for line in router.lines if "roles: instance" in line]
        assert "becomes prefill" in changes[0] and "becomes decode" in changes[-1]
        changed = "fastdeploy_router_role_changes_total"
        assert router.metric(changed, outcome="200") == len(changes)
        assert router.metric("fastdeploy_router_role_demand", role="decode") > 0
    finally:
        for process in (router, *servers):
            process.stop()


def test_changing_roles_takes_the_secret(tmp_path: Path) -> None:
    words = ("router", "--instances", "http://127.0.0.1:1", "--slo-tpot", "0.1")
    process = CommandProcess(*words, extra={"FD_CACHE_DIR": str(tmp_path)})
    assert process.wait() != 0
    assert "kv-secret" in process.log and "FD_KV_SECRET" in process.log
