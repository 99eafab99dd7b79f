"""Clients that send what is costly: refused before it costs, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fd_agent_apis.request_templates import render_in_child

from fastdeploy_core.engine.input import SURE_CHARS
from fastdeploy_core.serving import server as server_module
from fastdeploy_core.serving.http.errors import ApiError
from fastdeploy_core.serving.http.protocol import has_left
from fastdeploy_core.serving.http.threads import Threads
from fastdeploy_core.serving.server import NEW_S
from fastdeploy_core.tokenizer import Tokenizer
from tests.server_support import LiveServer, ScriptedEngine, live, wait_for

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HUGE = "a bit of text, " * 500_000


class Watched(Tokenizer):
    """Notes what is tokenized, and in which threads."""

    num_chars = 0
    threads: set[str] = set()  # noqa: RUF012 - one for all, cleared by the tests

    def encode_batch(self, texts: Any, add_special_tokens: bool = True) -> list[list[int]]:
        Watched.num_chars += sum(map(len, texts))
        Watched.threads.add(threading.current_thread().name.partition("_")[0])
        return super().encode_batch(texts, add_special_tokens)


@pytest.fixture
def watched(tokenizer_folder: Any, engine: ScriptedEngine) -> Any:
    tokenizer = Watched.load(tokenizer_folder)
    with live(engine, tokenizer) as server:
        Watched.num_chars = 0
        Watched.threads.clear()
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": HUGE}),
        ("/tokenize", {"messages": [{"role": "user", "content": HUGE[: 2 * SURE_CHARS]}]}),
        (TEXT, {"prompt": HUGE}),
        (TEXT, {"prompt": ["x", HUGE]}),
        (CHAT, {"messages": [{"role": "user", "content": HUGE}]}),
        (TEXT, {"prompt": "x", "bad_words": ["x" * 60_000] * 128}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "bad_words": [HUGE]}),
        (TEXT, {"prompt": "x", "logits_processors_args": {"a": HUGE}}),
    ],
)
def test_texts_are_bounded_before_they_are_tokenized(
    watched: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    response = watched.post(path, json=body)
    assert response.status_code == 400, response.text[:200]
    assert "character" in response.json()["error"]["message"]
    assert Watched.num_chars <= 1


def test_a_text_to_be_cut_is_not_tokenized_whole(
    watched: httpx.Client, engine: ScriptedEngine
) -> None:
    for side in ("left", "right"):
        body = {"prompt": HUGE, "truncate_prompt_tokens": -1, "truncation_side": side}
        assert watched.post(TEXT, json=body).status_code == 200
        room = 512 - 16
        kept = HUGE[-room:] if side == "left" else HUGE[:room]
        assert engine.tokenizer.decode(engine.requests[-1].prompt_token_ids) == kept
    assert Watched.num_chars <= 2 * SURE_CHARS


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "y" * 5000, "truncate_prompt_tokens": -1},
        {"prompt": "y", "bad_words": ["some words " * 20] * 100},
    ],
)
def test_long_work_leaves_the_event_loop(watched: httpx.Client, fields: dict[str, Any]) -> None:
    assert watched.post(TEXT, json={"prompt": "x"}).status_code == 200
    assert "tokenizer" not in Watched.threads  # a short call takes less than passing it on
    Watched.threads.clear()
    assert watched.post(TEXT, json=fields).status_code == 200
    assert Watched.threads == {"tokenizer"}


@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "field",
    [
        {"metadata": {f"k{i}": i for i in range(300_000)}},
        {"logit_bias": {str(i): 1 for i in range(300_000)}},
        {"tools": [[] for _ in range(300_000)]},
        {"tokens": list(range(2**19))},
    ],
    ids=lambda field: next(iter(field)),
)
def test_bodies_of_many_parts_are_refused(client: httpx.Client, path: str, field: Any) -> None:
    response = client.post(path, json=field)
    assert response.status_code == 400
    assert "too many parts" in response.json()["error"]["message"]


def test_templates_of_requests_do_not_hold_up_others(
    engine: ScriptedEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(render_in_child.__kwdefaults__, "limit_s", 0.5)
    loop = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    message = [{"role": "user", "content": "x" * 5000}]
    hostile = {"messages": message, "chat_template": loop}
    usual = {"messages": message, "truncate_prompt_tokens": 100}
    with (
        live(engine, tokenizer, trust_request_chat_template=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        ThreadPoolExecutor(30) as pool,
    ):
        attacks = [
            pool.submit(httpx.post, server.url + CHAT, json=hostile, timeout=600) for _ in range(30)
        ]
        wait_for(lambda: client.get("/load").json()["server_load"] >= 10, "the templates")
        assert client.post(CHAT, json=usual).status_code == 200
        assert sum(attack.done() for attack in attacks) < 24, "others waited for the templates"
        codes = [attack.result().status_code for attack in attacks]
    assert set(codes) == {400, 429}
    assert codes.count(429) == 30 - 4 - 16


def test_a_client_that_leaves_in_its_body_is_no_error_of_the_server(
    server: LiveServer, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with caplog.at_level("INFO"):
        for path in (b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/nope"):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                wanted = head.replace(b"/v1/completions", path)
                connection.sendall(wanted + b'Content-Length: 100\r\n\r\n{"prompt": ')
                time.sleep(0.05)
        assert client.post(TEXT, json={"prompt": "x"}).status_code == 200
        time.sleep(0.2)
    noisy = [r for r in caplog.records if r.levelname in ("WARNING", "ERROR") or r.exc_info]
    assert not noisy, [r.getMessage() for r in noisy]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "Hi"}'


@pytest.mark.parametrize(
    ("sent", "gone"),
    [
        (b"", True),
        (b"\x16\x03\x01", True),  # TLS, whose handshake will not end
        (HEAD, True),
        (HEAD + b"Content-Length: 16\r\n\r\n" + BODY[:9], True),
        (HEAD + b"content-LENGTH:16\r\n\r\n" + BODY[:9], True),
        (HEAD + b"Content-Length: 16\r\n\r\n" + BODY, False),
        (HEAD + b"Content-Length: 16\r\n\r\n" + BODY + HEAD, False),
        (b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n", False),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", False),
        (HEAD + b"Content-Length: 9000\r\n\r\n" + b" " * 8000, False),  # more than is looked at
    ],
)
def test_a_client_has_left_if_no_request_can_become_whole(sent: bytes, gone: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
        with client, connection:
            client.sendall(sent)
            assert not has_left(connection), "more may come"
            client.shutdown(socket.SHUT_WR)
            wait_for(lambda: has_left(connection) or not gone, "its end to be seen")
            assert has_left(connection) == gone
            assert connection.recv(len(sent), socket.MSG_WAITALL) == sent, "nothing was taken"


def arriving(
    server: LiveServer, count: int, sent: bytes
) -> tuple[list[socket.socket], Coroutine[Any, Any, None]]:
    """Clients, and what hands their connections over, as a front door does."""
    clients, connections = [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(count):
            clients.append(socket.create_connection(listener.getsockname(), timeout=20))
            connections.append(listener.accept()[0])
            connections[-1].setblocking(False)
            clients[-1].sendall(sent)

    async def adopt() -> None:
        for connection in connections:
            server.server.adopt(connection)

    return clients, adopt()


@pytest.mark.parametrize(("turn_s", "most"), [(0.0, 1), (5 * NEW_S, 6)])
def test_new_connections_get_a_small_share_of_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, turn_s: float, most: int
) -> None:
    clock = itertools.count()  # each turn asks once for the time
    now = SimpleNamespace(monotonic=lambda: turn_s * next(clock))
    monkeypatch.setattr(server_module, "time", now)
    served = server.server.server_state.connections
    before, made = len(served), [0]

    async def count(adopt: Coroutine[Any, Any, None]) -> None:
        await adopt
        while made[-1] < 30 and len(made) < 1000:
            await asyncio.sleep(0)
            made.append(len(served) - before)

    clients, adopt = arriving(server, 30, HEAD)
    server.run(count(adopt))
    for client in clients:
        client.close()
    assert made[-1] == 30
    assert max(later - earlier for earlier, later in pairwise(made)) == most


def test_tenants_take_turns_and_the_queue_is_bounded() -> None:
    order: list[str] = []
    gate = threading.Event()

    async def main() -> None:
        threads = Threads(1, 5, "test")
        held = asyncio.create_task(threads.run("a", gate.wait, 30))
        await asyncio.sleep(0)
        waiting = [
            asyncio.create_task(threads.run(name[0], order.append, name))
            for name in ("a1", "a2", "a3", "b1", "c1")
        ]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await threads.run("d", order.append, "d1")
        assert refused.value.status == 429
        waiting[1].cancel()
        await asyncio.sleep(0)
        late = asyncio.create_task(threads.run("d", order.append, "d1"))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(held, *waiting, late, return_exceptions=True)
        assert await threads.run("a", lambda: 7) == 7
        threads.close()

    asyncio.run(main())
    assert order == ["a1", "b1", "c1", "d1", "a3"]


def test_a_thread_that_holds_the_interpreter_rests_between_calls() -> None:
    """However many large bodies come, the event loop has most of the time."""
    calls: list[tuple[float, float]] = []

    def work() -> None:
        began_s = time.monotonic()
        time.sleep(0.01)
        calls.append((began_s, time.monotonic()))

    async def main() -> None:
        threads = Threads(1, 100, "test", rest=3.0)
        await asyncio.gather(*(threads.run(f"tenant {n % 2}", work) for n in range(8)))
        threads.close()

    asyncio.run(main())
    for (began_s, ended_s), (next_s, _) in pairwise(calls):
        assert next_s - ended_s > 2.5 * (ended_s - began_s)


def test_a_caller_that_leaves_does_not_free_its_thread_early() -> None:
    running: list[int] = []
    most: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        with lock:
            running.append(1)
            most.append(len(running))
        time.sleep(0.02)
        with lock:
            running.pop()

    async def main() -> None:
        threads = Threads(2, 100, "test")
        calls = [asyncio.create_task(threads.run("a", work)) for _ in range(20)]
        await asyncio.sleep(0.03)
        for call in calls[::2]:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert await asyncio.wait_for(threads.run("a", lambda: 7), 60) == 7
        assert await asyncio.wait_for(threads.run("b", lambda: 8), 60) == 8
        threads.close()

    asyncio.run(main())
    assert max(most) <= 2


def test_the_server_says_what_is_too_large(client: httpx.Client) -> None:
    body = json.dumps({"prompt": "x", "logit_bias": {str(i): 1 for i in range(301)}})
    headers = {"Content-Type": "application/json"}
    error = client.post(TEXT, content=body, headers=headers).json()["error"]
    assert error["param"] == "logit_bias"
    assert "300" in error["message"]
