"""Prefill and decode apart while processes die, freeze, are full, are replaced or unlike each
other, and clients leave: every answer is that of one instance, within bounded time, and every
block comes back."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from roles import TEXT, Apart, ask, check_idle, metric, said, taken, text_body
from server_process import CommandProcess
from server_support import wait_for

# Blocks of the prompt that the prefill instance has computed when something happens; of about 40.
MOMENTS = (0, 8, 24)
ENDS_S = 30.0  # the lease of ten seconds, and the answer, on a busy machine


@pytest.fixture(scope="module", params=["shm", "tcp"])
def apart(request: pytest.FixtureRequest) -> Iterator[Apart]:
    """Tests leave three processes that know each other."""
    made = Apart("--kv-transport", request.param)
    yield made
    made.stop()


def ask_and(apart: Apart, body: dict[str, Any], blocks: int, do: Any) -> dict[str, Any]:
    """The answer to a request during which `do` is called."""
    with ThreadPoolExecutor(1) as threads:
        started = time.monotonic()
        asking = threads.submit(ask, apart.router.url, TEXT, body)
        wait_for(
            lambda: asking.done() or metric(apart.prefill, "kv_blocks_used{") >= blocks, "blocks"
        )
        do()
        answer = asking.result()
    assert time.monotonic() - started < ENDS_S
    return answer


@pytest.mark.parametrize("blocks", MOMENTS)
def test_the_prefill_instance_is_killed(apart: Apart, blocks: int) -> None:
    """F1: the prompt is computed where it is answered. The next one is, too, until there is
    another prefill instance."""
    body = text_body(f"kill prefill {blocks}", 30)
    answer = ask_and(apart, body, blocks, apart.prefill.process.kill)
    assert said(ask(apart.decode.url, TEXT, body)) == said(answer)
    alone = text_body(f"alone {blocks}")
    assert said(ask(apart.router.url, TEXT, alone)) == said(ask(apart.decode.url, TEXT, alone))
    check_idle(apart.decode)
    apart.replace("prefill")
    before = taken(apart.decode)
    ask(apart.router.url, TEXT, text_body(f"again {blocks}"))
    assert taken(apart.decode) == before + 1


@pytest.mark.parametrize("blocks", MOMENTS)
def test_the_decode_instance_is_killed(apart: Apart, blocks: int) -> None:
    """F2: another instance answers, which is the prefill instance here; it forgets the prompt that
    it computed for the one that died."""
    body = text_body(f"kill decode {blocks}", 30)
    answer = ask_and(apart, body, blocks, apart.decode.process.kill)
    assert said(ask(apart.prefill.url, TEXT, body)) == said(answer)
    check_idle(apart.prefill)
    apart.replace("decode")
    ask(apart.router.url, TEXT, text_body(f"again {blocks}"))
    assert taken(apart.decode) == 1


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_one_freezes_for_five_seconds(apart: Apart, who: str) -> None:
    """F3: whoever wakes up finds that its peer has gone on without it, or goes on itself."""
    process: CommandProcess = getattr(apart, who)
    body = text_body(f"freeze {who}", 30)

    def freeze() -> None:
        process.signal(signal.SIGSTOP)
        time.sleep(5)
        process.signal(signal.SIGCONT)

    answer = ask_and(apart, body, 8, freeze)
    assert said(ask(apart.prefill.url, TEXT, body)) == said(answer)
    check_idle(apart.prefill, apart.decode)
    apart.wait()
    before = taken(apart.decode)
    ask(apart.router.url, TEXT, text_body(f"after {who}"))
    assert taken(apart.decode) == before + 1, "all is as before"


def test_the_router_is_killed_and_another_one_comes(apart: Apart) -> None:
    """F11: its clients lose their answers; instances forget both halves of the request."""
    with ThreadPoolExecutor(1) as threads:
        body = text_body("router", 30, max_tokens=200)
        asking = threads.submit(httpx.post, apart.router.url + TEXT, json=body, timeout=60)
        wait_for(lambda: metric(apart.prefill, "kv_blocks_used{") >= 8, "the prompt to be there")
        apart.router.process.kill()
        with pytest.raises(httpx.HTTPError):
            asking.result()
    check_idle(apart.prefill, apart.decode)
    apart.route()
    before = taken(apart.decode)
    answer = ask(apart.router.url, TEXT, body)
    assert taken(apart.decode) == before + 1
    assert said(ask(apart.prefill.url, TEXT, body)) == said(answer)


def test_a_thousand_clients_leave(apart: Apart) -> None:
    """F9 and F15: in whatever state their requests are, a hundred at once. Nothing is held
    afterwards."""
    turns = asyncio.Semaphore(100)

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        body = text_body(f"leaves {number}", 3 + number % 9, max_tokens=100)
        timeout = httpx.Timeout(30, read=0.01 + number % 20 / 20)
        async with turns:
            with contextlib.suppress(httpx.TimeoutException):
                await client.post(apart.router.url + TEXT, json=body, timeout=timeout)

    async def all_leave() -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits) as client:
            await asyncio.gather(*(leave(client, number) for number in range(1000)))

    asyncio.run(all_leave())
    check_idle(apart.prefill, apart.decode)
    body = text_body("stays")
    before = taken(apart.decode)
    assert said(ask(apart.router.url, TEXT, body)) == said(ask(apart.prefill.url, TEXT, body))
    assert taken(apart.decode) == before + 1


def replaced(apart: Apart, *options: str) -> None:
    """Another decode instance, with more options."""
    apart.decode.stop()
    own, apart.options = apart.options, (*apart.options, *options)
    apart.replace("decode")
    apart.options = own


def test_a_decode_instance_without_room(apart: Apart) -> None:
    """F8: what finds no room in its host tier is computed there."""
    replaced(apart, "--swap-space", "0.001")
    bodies = [text_body(f"room {number}", 20) for number in range(6)]
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda body: ask(apart.router.url, TEXT, body), bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert said(ask(apart.prefill.url, TEXT, body)) == said(answer)
    check_idle(apart.prefill, apart.decode)


@pytest.mark.parametrize("options", [("--block-size", "32"), ("--kv-cache-dtype", "int8")], ids=str)
def test_unlike_instances_compute_for_themselves(apart: Apart, options: tuple[str, ...]) -> None:
    """F12: with one line in the log that says why."""
    replaced(apart, *options)
    body = text_body("unlike")
    answer = ask(apart.router.url, TEXT, body)
    assert said(ask(apart.decode.url, TEXT, body)) == said(answer)
    assert taken(apart.decode) == 0
    assert "KV handover: cannot connect" in apart.decode.log
    check_idle(apart.prefill, apart.decode)
