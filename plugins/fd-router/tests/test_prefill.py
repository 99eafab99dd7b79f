"""Prefill and decode apart: two real servers that share a KV store, and a router that sends a
prompt to one and has the other answer it."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import MODEL, Router
from fd_router.asked import read_request
from fd_router.options import parse
from fd_router.prefill import first_token, has_prompt
from server_process import CommandProcess, ServerProcess
from server_support import wait_for

from fastdeploy_core.errors import ConfigError

BLOCK_SIZE = 16
STORY = "Once upon a time there was a king who had three daughters and no bread at all. "
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def server(folder: Path, wait_s: float) -> ServerProcess:
    """On the demo model, with a KV store in the folder."""
    return ServerProcess(
        MODEL,
        *("--max-num-seqs", "8"),
        *("--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", "128"),
        *("--num-gpu-blocks-override", "256", "--swap-space", "0.1", "--num-threads", "1"),
        *("--kv-store", "disk", "--kv-store-config.path", str(folder)),
        *("--kv-store-config.wait_s", str(wait_s)),
    )


class Apart:
    """A prefill instance, a decode instance, and the router."""

    def __init__(self, folder: Path) -> None:
        self.prefill, self.decode = server(folder, 0), server(folder, 2)
        options = ("--prefill", self.prefill.url, "--prefill-min-tokens", "64")
        self.router = Router([self.decode.url], *options).until_ready(1)
        wait_for(lambda: self.router.listed("state")[self.prefill.name] == "ready", "the prefill")

    def sent(self, outcome: str) -> float:
        """Prompts that went to the prefill instance, by what came of them."""
        return self.router.metric("fastdeploy_router_prefills_total", outcome=outcome)

    def stop(self) -> None:
        for process in (self.router, self.decode, self.prefill):
            process.signal(signal.SIGCONT)
            process.stop()


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    """Tests leave all three alive."""
    made = Apart(tmp_path_factory.mktemp("kv"))
    yield made
    made.stop()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Apart]:
    """Processes of a test's own, which it may harm."""
    made = Apart(tmp_path)
    yield made
    made.stop()


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def choices(answer: dict[str, Any]) -> list[Any]:
    return answer["choices"]


def cached(answer: dict[str, Any]) -> int:
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, {"temperature": 0}),
    "seeded": (TEXT, {"temperature": 1.0, "seed": 3}),
    "several": (TEXT, {"temperature": 1.0, "seed": 5, "n": 3}),
    "logprobs": (TEXT, {"temperature": 0, "logprobs": 3}),
    "chat": (CHAT, {"temperature": 0, "max_completion_tokens": 9, "logprobs": True}),
    "json": (
        CHAT,
        {
            "temperature": 0,
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
    text = f"({case}) " + STORY * 12  # a prompt of its own, several chunks long
    prompt = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    body = {"max_tokens": 12, **prompt, **fields}
    before = apart.sent("200")
    answer = ask(apart.router.url, path, body)
    assert apart.sent("200") == before + 1
    # all whole blocks before the last token
    num_prompt = answer["usage"]["prompt_tokens"]
    assert num_prompt > 128 and cached(answer) == (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
    alone = ask(apart.prefill.url, path, body)
    assert choices(alone) == choices(answer)


def test_a_stream_says_the_same(apart: Apart) -> None:
    body = {"prompt": "(stream) " + STORY * 9, "max_tokens": 12, "temperature": 0}
    lines: list[str] = []
    with httpx.stream(
        "POST", apart.router.url + TEXT, json={**body, "stream": True}, timeout=60
    ) as answer:
        lines += [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    text = "".join(c["text"] for line in lines[:-1] for c in json.loads(line)["choices"])
    assert text == ask(apart.prefill.url, TEXT, body)["choices"][0]["text"]


def test_short_prompts_and_other_routes_are_answered_at_once(apart: Apart) -> None:
    before = apart.sent("200")
    ask(apart.router.url, TEXT, {"prompt": "Once", "max_tokens": 2})
    ask(apart.router.url, "/tokenize", {"prompt": STORY * 20})
    assert apart.sent("200") == before


def test_a_bad_request_is_refused_by_the_one_that_answers(apart: Apart) -> None:
    body = {"prompt": STORY * 9, "max_tokens": 4, "temperature": -3}
    answer = httpx.post(apart.router.url + TEXT, json=body)
    assert answer.status_code == 400 and "temperature" in answer.text


def test_every_block_comes_back(apart: Apart) -> None:
    body = {"prompt": "(idle) " + STORY * 9, "max_tokens": 4}
    ask(apart.router.url, TEXT, body)
    for instance in (apart.prefill, apart.decode):
        text = httpx.get(instance.url + "/metrics").text
        used = [line for line in text.splitlines() if line.startswith("fastdeploy:kv_blocks_used")]
        assert [float(line.rpartition(" ")[2]) for line in used] == [0.0]


def test_the_prefill_instance_is_killed_before_while_and_after(
    own: Apart, stopped: Callable[[CommandProcess], None]
) -> None:
    def body(number: int) -> dict[str, Any]:
        return {"prompt": f"({number}) " + STORY * 12, "max_tokens": 12, "temperature": 0}

    answers = [ask(own.router.url, TEXT, body(0))]
    started = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        stopped(own.prefill)  # so that it has the request when it dies
        asking = threads.submit(ask, own.router.url, TEXT, body(1))
        wait_for(lambda: own.router.in_flight()[own.prefill.name], "the request to be there")
        own.prefill.process.kill()
        answers.append(asking.result())
    assert own.sent("failed") == 1
    answers.append(ask(own.router.url, TEXT, body(2)))  # the router may not know yet
    wait_for(lambda: own.router.listed("state")[own.prefill.name] != "ready", "the loss")
    answers.append(ask(own.router.url, TEXT, body(3)))
    assert time.monotonic() - started < 30
    assert cached(answers[0]) > 0 and not any(map(cached, answers[1:]))
    for number, answer in enumerate(answers):
        assert choices(ask(own.decode.url, TEXT, body(number))) == choices(answer)


def test_a_frozen_prefill_instance_costs_bounded_time(
    own: Apart, stopped: Callable[[CommandProcess], None]
) -> None:
    body = {"prompt": STORY * 12, "max_tokens": 12, "temperature": 0}
    stopped(own.prefill)
    started = time.monotonic()
    answer = ask(own.router.url, TEXT, body)
    assert time.monotonic() - started < 15  # three probes of half a second, and the answer
    assert choices(ask(own.decode.url, TEXT, body)) == choices(answer)
    started = time.monotonic()
    ask(own.router.url, TEXT, {**body, "prompt": "(again) " + STORY * 12})
    assert time.monotonic() - started < 10, "it is known to be lost: nobody waits for it"


@pytest.mark.parametrize("way", ["roles", "store"])
def test_the_pages_commands_work_word_for_word(tmp_path: Path, way: str) -> None:
    """But for the ports, which others may have, and the model's folder."""
    page = (MODEL.parents[1] / "docs" / "how-to" / "prefill-and-decode-apart.md").read_text()
    commands = re.findall(r"```bash\n(fastdeploy serve.*?)```", page, re.DOTALL)
    command = commands[["roles", "store"].index(way)]
    ports = {}
    for named in ("8181", "8182", "8100"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports[named] = free.getsockname()[1]
        command = command.replace(named, str(ports[named]))
    command = command.replace("DIR", str(MODEL)).replace(
        "fastdeploy ", f"{sys.executable} -P -m fastdeploy_core.cli.main "
    )
    log = tmp_path / "log"
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-c", command],
            env={**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{ports['8100']}"

    def is_used() -> bool:
        if 'outcome="200"' in httpx.get(url + "/metrics").text:
            return True
        # Another one each time: one that was answered before both were ready is cached there.
        body = {"prompt": secrets.token_hex(4) + STORY * 20, "max_tokens": 1}
        httpx.post(url + TEXT, json=body, timeout=60)
        return False

    def answers() -> bool:
        try:
            return is_used()
        except httpx.HTTPError:
            return False

    try:
        wait_for(answers, log.read_text() or "both servers", 120)
        body = {"prompt": "(page) " + STORY * 20, "max_tokens": 8, "temperature": 0}
        answer = ask(url, TEXT, body)
        if way == "store":
            assert cached(answer) > 0
        else:  # two: that of is_used, and this one
            text = httpx.get(f"http://127.0.0.1:{ports['8182']}/metrics").text
            found = re.findall(r"^fastdeploy:kv_taken_over_total\S* (\S+)", text, re.MULTILINE)
            assert sum(map(float, found)) > 1
        alone = ask(f"http://127.0.0.1:{ports['8181']}", TEXT, body)
        assert choices(alone) == choices(answer)
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(30)


def test_what_a_prefill_instance_is_asked() -> None:
    fields = {"prompt": "x", "max_tokens": 50, "min_tokens": 9, "n": 4, "stream": True}
    asked = read_request(TEXT + "?a=b", {}, json.dumps({**fields, "cache_salt": "s"}).encode())
    assert has_prompt(asked) and json.loads(first_token(asked)) == {
        **{"prompt": "x", "cache_salt": "s"},
        **{"max_tokens": 1, "n": 1, "stream": False},
    }
    for path, body in ((TEXT, b"no json"), ("/v1/models", b"{}"), (TEXT, b'{"prompt_logprobs":1}')):
        assert not has_prompt(read_request(path, {}, body))


@pytest.mark.parametrize(
    "words",
    [
        ["--instances", "a:1", "--prefill", "a:1"],
        ["--instances", "a:1", "--prefill", "b:1,b:1"],
        ["--instances", "a:1", "--prefill", "ftp://b"],
        ["--instances", "a:1", "--prefill", "b:1", "--prefill-timeout", "0"],
    ],
)
def test_prefill_options_that_cannot_be(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="prefill"):
        parse(words)


@pytest.mark.parametrize("port", ["-1", "99999"])
def test_a_port_is_a_port(port: str) -> None:
    """The event loop would take it modulo 65536."""
    with pytest.raises(ConfigError, match="--port must be between 0 and 65535"):
        parse(["--instances", "a:1", "--port", port])
