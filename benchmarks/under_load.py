r"""Checks of a server under load: what it keeps when more comes than it can serve.

    python benchmarks/under_load.py models/ernie-tiny --tensor-library torch
    python benchmarks/under_load.py MODEL --only burst,fair --seconds 60 -- --device cuda

Starts one small server (8 sequences at once, 64 requests in flight, contexts of 512 tokens, two API
keys) and puts each kind of load on it in turn. Prints what was measured, what it is held to, and
whether it was kept; ends with 1 if anything was not. Clients and server share the processors, and
limits of time are those of a quiet machine. Arguments after -- go to the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import re
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from start_up import Start, family
from under_attack import CHAT, TEXT, p99

from fastdeploy_core.serving.http.protocol import HEAD_TIMEOUT_S

SERVER = (
    *("--max-num-seqs", "8", "--max-model-len", "512", "--block-size", "16"),
    *("--max-concurrency", "64", "--api-key", "one", "--api-key", "two"),
)
BUSY = (429, 503)
NUM_STREAMS = 8
CONNECTIONS = 10_000
SILENT, SLOW, BURST = 1000, 200, 1280


class Answer(NamedTuple):
    """One answer; seconds from its request until its pieces came."""

    status: int
    pieces: list[float]
    end_s: float
    is_whole: bool
    says_when: bool  # it names a time to come again

    @property
    def token_s(self) -> float:
        """Seconds between tokens, on average."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, len(self.pieces) - 1)


class Load:
    """The server, and clients of it."""

    def __init__(self, server: Start, seconds: float) -> None:
        self.url, self.pid, self.seconds = server.url, server.process.pid, seconds
        self.port = int(server.url.rpartition(":")[2])
        self.client = httpx.AsyncClient(base_url=server.url, timeout=120)
        self.quiet: list[Answer] = []  # answers of `steady`

    async def ask(self, num_prompt: int, num_tokens: int, key: str = "one") -> Answer:
        """One streamed answer."""
        prompt = [random.randrange(5, 200) for _ in range(num_prompt)]
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        data = json.dumps({**body, "ignore_eos": True, "stream": True}).encode()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {key}"
        )
        head += f"\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        began, pieces, text = time.perf_counter(), [], b""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.encode() + data)
        while piece := await reader.read(65536):
            text += piece
            pieces.append(time.perf_counter() - began)
        writer.close()
        status, says_when = int(text[9:12]), b"\r\nretry-after:" in text.lower()
        is_whole = status == 200 and b"[DONE]" in text and b'"error"' not in text
        return Answer(status, pieces, time.perf_counter() - began, is_whole, says_when)

    async def streams(
        self, count: int, seconds: float, key: str = "one", most: tuple[int, int] = (256, 128)
    ) -> list[Answer]:
        """Answers of clients that ask one after the other."""
        until, answers = time.monotonic() + seconds, []

        async def client() -> None:
            while time.monotonic() < until:
                sizes = (random.randrange(1, most[0]), random.randrange(2, most[1]))
                answers.append(await self.ask(*sizes, key))
                if answers[-1].status in BUSY:
                    await asyncio.sleep(0.1)

        await asyncio.gather(*(client() for _ in range(count)))
        return answers

    async def metric(self, name: str) -> float:
        """A number that the server reports."""
        answer = await self.client.get("/metrics", headers={"Authorization": "Bearer one"})
        found = re.search(rf"^fastdeploy:{name}{{[^}}]*}} (\S+)$", answer.text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def seconds_until(self, is_so: Callable[[], Awaitable[bool]], limit_s: float) -> float:
        """When something is so, infinite after a limit."""
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            if await is_so():
                return time.monotonic() - began
            await asyncio.sleep(0.02)
        return float("inf")

    async def seconds_until_free(self) -> float:
        """When no KV block is in use any more."""

        async def is_free() -> bool:
            return await self.metric("kv_blocks_used") == 0

        return await self.seconds_until(is_free, 20)

    def num_files(self) -> int:
        """Open files of the server's processes."""
        found = 0
        for pid in family(self.pid):
            with suppress(OSError):
                found += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return found

    async def seconds_until_closed(self, before: int) -> float:
        """When the server has no more files open than before, but five."""

        async def is_back() -> bool:
            return self.num_files() <= before + 5

        return await self.seconds_until(is_back, 20)


Found = tuple[str, float, float]  # what was measured, how much, and at most how much
Check = Callable[[Load], Awaitable[list[Found]]]


def not_whole(answers: Iterable[Answer]) -> int:
    """How many answers were refused or broken."""
    return sum(not answer.is_whole for answer in answers)


async def steady(load: Load) -> list[Found]:
    """Eight streams."""
    load.quiet = await load.streams(NUM_STREAMS, load.seconds)
    tokens = [answer.token_s for answer in load.quiet if answer.is_whole]
    return [
        ("answers that failed", not_whole(load.quiet), 0),
        ("time of a token, p99 over p50", p99(tokens) / statistics.median(tokens), 3),
        ("seconds until all blocks are free", await load.seconds_until_free(), 1),
    ]


async def at_rate(load: Load, rate: float, seconds: float) -> list[Answer]:
    """Answers to requests that come whether or not earlier ones are answered."""
    began, jobs = time.monotonic(), []
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
        jobs.append(asyncio.create_task(load.ask(32, 32)))
    return list(await asyncio.gather(*jobs))


def watch_health(port: int, until: float) -> tuple[list[float], int]:
    """Seconds of each answer of a probe, and how many were not 200."""
    seconds, failed = [], 0
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        while time.time() < until:
            for path in ("/health/live", "/health/ready"):
                began = time.perf_counter()
                failed += client.get(path).status_code != 200
                seconds.append(time.perf_counter() - began)
            time.sleep(0.1)
    return seconds, failed


async def overload(load: Load) -> list[Found]:
    """One, two and five times as many requests as are answered; probes meanwhile."""
    asked = await asyncio.gather(*(load.ask(32, 32) for _ in range(4 * NUM_STREAMS)))
    rate = len(asked) / max(answer.end_s for answer in asked)
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        await loop.run_in_executor(pool, time.sleep, 0.1)
        until = time.time() + 3 * load.seconds + 2
        probes = loop.run_in_executor(pool, watch_health, load.port, until)
        lags = asyncio.create_task(lags_until(load, until))
        at_once = await at_rate(load, rate, load.seconds)
        twice = await at_rate(load, 2 * rate, load.seconds)
        five = await at_rate(load, 5 * rate, load.seconds)
        seconds, failed = await probes
    refused = [answer for answer in (*at_once, *twice, *five) if not answer.is_whole]
    busy = [a for a in refused if a.status in BUSY and a.says_when]
    good = [len(answers) - not_whole(answers) for answers in (at_once, five)]
    return [
        (
            "answers at the rate of one, over those at five times",
            good[0] / max(1, good[1]),
            1 / 0.9,
        ),
        ("refusals other than 429 and 503 with Retry-After", len(refused) - len(busy), 0),
        ("ms until a refusal, p99", 1000 * p99([a.end_s for a in busy] or [0.0]), 100),
        ("requests in flight afterwards", await load.metric("requests_in_flight"), 0),
        ("probes that were not 200", failed, 0),
        ("ms of a probe, p99", 1000 * p99(seconds), 200),
        ("ms that the event loop was late, most", 1000 * max(await lags), 250),
    ]


async def lags_until(load: Load, until: float) -> list[float]:
    """How late the server's event loop was, second by second."""
    found = [0.0]
    while time.time() < until:
        await asyncio.sleep(1)
        found.append(await load.metric("loop_lag_seconds"))
    return found


async def burst(load: Load) -> list[Found]:
    """Many requests at once."""
    before = load.num_files()
    answers = await asyncio.gather(*(load.ask(16, 8) for _ in range(BURST)))
    unlike = [answer for answer in answers if not answer.is_whole and answer.status not in BUSY]
    return [
        ("requests without an answer of 200, 429 or 503", len(unlike), 0),
        ("seconds until the last answer", max(answer.end_s for answer in answers), 60),
        ("seconds until files are closed", await load.seconds_until_closed(before), 5),
    ]


def connect_often(port: int, count: int) -> int:
    """How many of so many short connections were not answered."""
    failed = 0
    for _ in range(count):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(
                    b"GET /version HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer one\r\n\r\n"
                )
                failed += not connection.recv(4096).startswith(b"HTTP/1.1 200")
        except OSError:
            failed += 1
    return failed


async def held_open(load: Load, count: int, head: bytes, limit_s: float) -> tuple[float, float]:
    """Connections that send a byte in five seconds, or nothing: seconds until the server has closed
    the last one, and time of a token of others meanwhile, over that without."""
    began, last_s = time.monotonic(), 0.0

    async def hold() -> None:
        nonlocal last_s
        reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
        for number in range(len(head)):
            writer.write(head[number : number + 1])
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(), 5.0)
                break
        with suppress(TimeoutError, OSError):
            await asyncio.wait_for(reader.read(), max(0.1, began + limit_s - time.monotonic()))
            last_s = max(last_s, time.monotonic() - began)
        writer.close()

    holding = asyncio.gather(*(hold() for _ in range(count)), return_exceptions=True)
    beside = await load.streams(NUM_STREAMS, limit_s)
    errors = [error for error in await holding if error is not None]
    usual = statistics.median(answer.token_s for answer in load.quiet)
    slower = statistics.median(answer.token_s for answer in beside) / usual
    return float("inf") if errors else last_s, slower if not not_whole(beside) else float("inf")


async def churn(load: Load) -> list[Found]:
    """Short connections, then silent ones, then slow ones."""
    before, loop = load.num_files(), asyncio.get_running_loop()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        each = CONNECTIONS // 2
        jobs = [loop.run_in_executor(pool, connect_often, load.port, each) for _ in range(2)]
        failed = sum(await asyncio.gather(*jobs))
    limit_s = HEAD_TIMEOUT_S + 2
    silent_s, beside_silent = await held_open(load, SILENT, b"", limit_s)
    slow_s, beside_slow = await held_open(load, SLOW, b"POST / HTTP/1.1", limit_s)
    return [
        (f"of {CONNECTIONS} short connections, not answered", failed, 0),
        (f"seconds until {SILENT} silent ones are closed", silent_s, limit_s),
        ("time of a token beside them, over without", beside_silent, 1.2),
        (f"seconds until {SLOW} slow ones are closed", slow_s, limit_s),
        ("time of a token beside them, over without", beside_slow, 1.2),
        ("seconds until files are closed", await load.seconds_until_closed(before), 5),
    ]


async def fair(load: Load) -> list[Found]:
    """One request a second of one key, beside forty streams of another."""

    async def now_and_then() -> list[Answer]:
        answers = []
        for _ in range(max(5, round(load.seconds))):
            answers.append(await load.ask(16, 4, "two"))
            await asyncio.sleep(1)
        return answers

    alone = await now_and_then()
    crowd = asyncio.create_task(load.streams(40, load.seconds + 2))
    await asyncio.sleep(1)
    beside = await now_and_then()
    await crowd
    first = [p99([answer.pieces[0] for answer in answers]) for answers in (alone, beside)]
    return [
        ("answers that failed", not_whole(beside), 0),
        ("time of its first token, p99, over alone", first[1] / first[0], 4),
    ]


async def long_prompts(load: Load) -> list[Found]:
    """Four prompts as long as they may be, beside four that answer."""
    alone = await load.ask(480, 2)
    answering = [asyncio.create_task(load.ask(8, 120)) for _ in range(4)]
    await asyncio.sleep(0.2)
    await asyncio.gather(*(load.ask(480, 2) for _ in range(4)))
    gaps = [b - a for job in answering for a, b in pairwise((await job).pieces)]
    return [("ms between tokens, most", 1000 * max(gaps), 2000 * alone.pieces[0] + 50)]


async def refusals(load: Load) -> list[Found]:
    """What cannot be served is refused soon."""

    async def refused(path: str, body: dict[str, Any]) -> tuple[int, float]:
        began = time.perf_counter()
        headers = {"Authorization": "Bearer one"}
        answer = await load.client.post(path, json=body, headers=headers)
        return answer.status_code, 1000 * (time.perf_counter() - began)

    fields = {"n": 10**9, "logprobs": 10**6, "stop": ["x"] * 10**4, "top_p": 2, "best_of": 10**18}
    fields |= {"logit_bias": {str(i): 1 for i in range(10_000)}, "max_tokens": -1}
    many = [await refused(TEXT, {"prompt": "x", name: value}) for name, value in fields.items()]
    messages = [{"role": "user", "content": "x"}] * 2049
    many.append(await refused(CHAT, {"messages": messages}))
    long = await refused(TEXT, {"prompt": "some text " * 400_000})
    return [
        ("bodies that were not refused", sum(s != 400 for s, _ in (*many, long)), 0),
        ("ms until a wrong field is refused, most", max(ms for _, ms in many), 50),
        ("ms until a text of 4 MB is refused", long[1], 500),
    ]


CHECKS: dict[str, Check] = {
    "steady": steady,
    "overload": overload,
    "burst": burst,
    "churn": churn,
    "fair": fair,
    "long prompts": long_prompts,
    "refusals": refusals,
}


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--tensor-library", default="", choices=["", "torch", "paddle"])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--only", default="", help="loads by a part of their name, with commas")
    own, _, serve = " ".join(["", *sys.argv[1:]]).partition(" -- ")
    options = parser.parse_args(own.split())
    options.serve = [*SERVER, *serve.split()]
    return options


async def measure(load: Load, names: Iterable[str]) -> int:
    """Print each load's findings; how many were not kept."""
    num_missed = 0
    await load.streams(NUM_STREAMS, 2.0)  # warm
    for name in names:
        for what, value, most in await CHECKS[name](load):
            num_missed += value > most
            verdict = "MISSED" if value > most else "kept"
            print(f"{name:14}{what:54}{value:10.2f}{most:10.2f}  {verdict}", flush=True)
    return num_missed


def main() -> int:
    """Run and print."""
    options = parse_arguments()
    wanted = [part for part in options.only.split(",") if part]
    names = [n for n in CHECKS if n == "steady" or not wanted or any(p in n for p in wanted)]
    print(
        f"{options.model} {' '.join(options.serve)}: {options.seconds:g} s each, "
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}\n"
        f"{'':68}{'measured':>10}{'at most':>10}",
        flush=True,
    )
    server = Start(options)
    try:
        server.wait_ready()
        return int(asyncio.run(measure(Load(server, options.seconds), names)) > 0)
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
