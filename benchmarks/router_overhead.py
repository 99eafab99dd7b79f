r"""What the router adds to a request: the same requests directly and through it, in turns.

    python benchmarks/router_overhead.py
    python benchmarks/router_overhead.py --requests 500 --streams 32 --step-ms 5

One server on the null device, which computes nothing, and two routers in front of it: one that
counts what it sent, one that follows the server's KV events and asks for a prompt's tokens. First
one request at a time with an answer of one token; then `--streams` streams at once. The client, the
routers and the server share the processors. Prints medians and 99th percentiles over all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from http_overhead import Server, null_model

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 20


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / "models" / "ernie-tiny"))
    parser.add_argument("--requests", type=int, default=300, help="one at a time, each way")
    parser.add_argument("--words", type=int, default=300, help="of a prompt")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=5.0, help="how long the device takes")
    parser.add_argument("--rounds", type=int, default=5, help="of streams, each way")
    options = parser.parse_args()
    options.api_server_count = 1
    return options


@contextlib.contextmanager
def router(instance: str, port: int, *more: str) -> Iterator[str]:
    """The URL of a running router."""
    command = [sys.executable, "-m", "fastdeploy_core.cli.main", "router", "--instances", instance]
    process = subprocess.Popen(
        [*command, "--port", str(port), *more], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def prompt(rng: random.Random, words: int) -> str:
    """Words that no other prompt begins with."""
    return " ".join(rng.choice(("river", "stone", "cloud", "seven", "light")) for _ in range(words))


async def one_by_one(
    session: aiohttp.ClientSession, urls: dict[str, str], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of requests, each way in turns."""
    found: dict[str, list[float]] = defaultdict(list)
    rng = random.Random(1)
    for number in range(options.requests + WARM_UP):
        for name, url in urls.items():
            body = {"prompt": prompt(rng, options.words), "max_tokens": 1, "temperature": 0}
            begun = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                await answer.read()
                assert answer.status == 200
            if number >= WARM_UP:
                found[name].append(time.perf_counter() - begun)
    return found


async def streams(
    session: aiohttp.ClientSession, url: str, options: argparse.Namespace, rng: random.Random
) -> tuple[list[float], float]:
    """Seconds to each stream's first text, and tokens a second of all."""
    first: list[float] = []

    async def one(text: str) -> None:
        body = {"prompt": text, "max_tokens": options.tokens, "ignore_eos": True, "stream": True}
        begun = time.perf_counter()
        is_first = True
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200
            last = b""
            async for chunk in answer.content.iter_any():
                if is_first:
                    first.append(time.perf_counter() - begun)
                    is_first = False
                last = (last + chunk)[-20:]
        assert last.endswith(b"data: [DONE]\n\n")

    begun = time.perf_counter()
    await asyncio.gather(*(one(prompt(rng, options.words)) for _ in range(options.streams)))
    return first, options.streams * options.tokens / (time.perf_counter() - begun)


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100)[98]


async def measure(urls: dict[str, str], options: argparse.Namespace) -> None:
    """Both tables."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        for url in urls.values():  # until the routers have found the server
            for _ in range(300):
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/health/ready") as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.1)
        alone = await one_by_one(session, urls, options)
        print("| way | p50, ms | p99, ms | added at p50 | added at p99 |\n|---|---|---|---|---|")
        base = alone["direct"]
        for name, values in alone.items():
            middle, late = statistics.median(values), p99(values)
            more = [middle - statistics.median(base), late - p99(base)]
            cells = " | ".join(f"{1000 * value:.2f}" for value in (middle, late, *more))
            print(f"| {name} | {cells} |")
        first: dict[str, list[float]] = defaultdict(list)
        rates: dict[str, list[float]] = defaultdict(list)
        rng = random.Random(2)
        for _ in range(options.rounds):
            for name, url in urls.items():
                seconds, rate = await streams(session, url, options, rng)
                first[name] += seconds
                rates[name].append(rate)
        print(
            f"\n| {options.streams} streams | first text p50, ms | p99, ms | "
            "tokens/s (least, most) |\n|---|---|---|---|"
        )
        for name, values in first.items():
            rate = rates[name]
            cells = f"{1000 * statistics.median(values):.0f} | {1000 * p99(values):.0f}"
            spread = f"{statistics.median(rate):.0f} ({min(rate):.0f}, {max(rate):.0f})"
            print(f"| {name} | {cells} | {spread} |")


def main() -> None:
    """Start everything, measure, print."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        null_model(options.model, folder, options.step_ms)
        events = {
            "enable_kv_cache_events": True,
            "endpoint": f"ipc://{folder}/events",
            "replay_endpoint": f"ipc://{folder}/replay",
        }
        options.streams = [options.streams]
        options.serve = ["--kv-events-config", json.dumps(events)]
        server = Server(options, folder)
        (options.streams,) = options.streams
        url = f"http://127.0.0.1:{server.port}"
        followed = f"127.0.0.1:{server.port}={events['endpoint']},{events['replay_endpoint']}"
        print(f"{platform.platform()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
        try:
            with (
                router(url, server.port + 1) as plain,
                router(url, server.port + 2, "--kv-events", followed) as following,
            ):
                urls = {"direct": url, "router": plain, "router with KV events": following}
                asyncio.run(measure(urls, options))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
