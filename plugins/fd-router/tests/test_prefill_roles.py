"""Prefill and decode apart: real servers with roles hand prompts to each other, over shared memory
and over TCP, while processes are killed, frozen, cut off and given other roles."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from conftest import MODEL, Router
from server_process import CommandProcess
from server_support import wait_for

BLOCK_SIZE = 16
STORY = "Once upon a time there was a king who had three daughters and no bread at all. "
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SECRET = "a secret of at least thirty-two characters"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def server(role: str, *options: str) -> CommandProcess:
    """On the demo model."""
    return CommandProcess(
        *("serve", str(MODEL), "--host", "127.0.0.1", "--port", "0", "--max-num-seqs", "8"),
        *("--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", "64"),
        *("--num-gpu-blocks-override", "256", "--swap-space", "0.1", "--num-threads", "1"),
        # A busy machine is no reason to give up.
        *("--splitwise-role", role, "--kv-transport-timeout", "600", *options),
        extra={"FD_KV_SECRET": SECRET},
    )


class Apart:
    """A prefill instance, a decode instance, and the router."""

    def __init__(self, *options: str) -> None:
        self.prefill, self.decode = server("prefill", *options), server("decode", *options)
        urls = [self.prefill.url, self.decode.url]
        self.router = Router(urls, "--prefill-min-tokens", "64").until_ready(2)
        wait_for(lambda: set(self.router.listed("role").values()) == {"prefill", "decode"}, "roles")

    def stop(self) -> None:
        for process in (self.router, self.decode, self.prefill):
            process.signal(signal.SIGCONT)
            process.stop()


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


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_body(name: str, repeat: int = 12, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"({name}) " + STORY * repeat, "max_tokens": 12, "temperature": 0, **fields}


def said(answer: dict[str, Any]) -> list[Any]:
    """The choices, without the digits of log-probabilities that a chunk's size decides."""
    text = re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda n: f"{float(n[0]):.3f}", repr(answer["choices"]))
    return [text]


def metric(process: CommandProcess, name: str) -> float:
    text = httpx.get(process.url + "/metrics", timeout=20).text
    lines = [line for line in text.splitlines() if line.startswith(f"fastdeploy:{name}")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def taken(process: CommandProcess) -> float:
    return metric(process, "kv_taken_over_total")


def check_idle(*processes: CommandProcess) -> None:
    """Every block has come back."""
    for process in processes:
        wait_for(lambda p=process: metric(p, "kv_blocks_used{") == 0, "blocks", 30)


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
    before = taken(apart.decode)
    answer = ask(apart.router.url, path, body)
    assert taken(apart.decode) == before + 1
    # all whole blocks before the last token
    num_prompt = answer["usage"]["prompt_tokens"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert num_prompt > 128 and cached == (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
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


def test_one_dies_while_it_hands_over(
    own: Apart, stopped: Callable[[CommandProcess], None]
) -> None:
    """The prefill instance: the prompt is computed at once. The decode instance: an error or
    another's answer, and the prefill instance forgets the prompt."""
    body = text_body("dies", 30)
    with ThreadPoolExecutor(1) as threads:
        started = time.monotonic()
        asking = threads.submit(ask, own.router.url, TEXT, body)
        wait_for(lambda: own.router.in_flight()[own.prefill.name], "the request to be there")
        own.prefill.process.kill()
        answer = asking.result()
    assert time.monotonic() - started < 20
    assert said(ask(own.decode.url, TEXT, body)) == said(answer)
    wait_for(lambda: own.router.listed("state")[own.prefill.name] != "ready", "the loss")
    again = ask(own.router.url, TEXT, text_body("alone"))
    assert said(ask(own.decode.url, TEXT, text_body("alone"))) == said(again)
    check_idle(own.decode)


def test_the_decode_instance_dies_while_it_waits(own: Apart) -> None:
    body = text_body("waits", 30)
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, own.router.url, TEXT, body)
        wait_for(lambda: own.router.in_flight()[own.prefill.name], "the request to be there")
        own.decode.process.kill()
        answer = asking.result()  # of the other: there is nobody else
    assert said(ask(own.prefill.url, TEXT, body)) == said(answer)
    check_idle(own.prefill)
    wait_for(lambda: metric(own.prefill, "num_requests_running") == 0, "its end")


def test_one_freezes_while_it_hands_over(
    own: Apart, stopped: Callable[[CommandProcess], None]
) -> None:
    body = text_body("freezes", 30)
    with ThreadPoolExecutor(1) as threads:
        started = time.monotonic()
        asking = threads.submit(ask, own.router.url, TEXT, body)
        wait_for(lambda: own.router.in_flight()[own.prefill.name], "the request to be there")
        stopped(own.prefill)
        answer = asking.result()
    assert time.monotonic() - started < 25  # a lease at most, and the answer
    own.prefill.signal(signal.SIGCONT)
    assert said(ask(own.prefill.url, TEXT, body)) == said(answer)
    check_idle(own.prefill, own.decode)
    before = taken(own.decode)
    wait_for(lambda: own.router.listed("state")[own.prefill.name] == "ready", "it to be back")
    ask(own.router.url, TEXT, text_body("after"))
    assert taken(own.decode) == before + 1, "and all is as before"


def test_several_ranks_hand_over_what_each_has() -> None:
    two = Apart("--kv-transport", "shm", "--tensor-parallel-size", "2")
    try:
        answer = ask(two.router.url, TEXT, text_body("ranks"))
        assert taken(two.decode) == 1
        assert said(ask(two.prefill.url, TEXT, text_body("ranks"))) == said(answer)
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
