r"""Engines that share the processors, against one engine that has them all: conversations in turns.

    python benchmarks/replicas.py models/ernie-tiny --rounds 3
    python benchmarks/replicas.py MODEL --engines 2 --threads 1 -- --device x86

Each round starts a server with one engine of engines x threads threads, then one with `--engines`
engines of `--threads` threads, and sends the same conversations to both: `--conversations` clients
at once, each with `--turns` turns; a turn's prompt is all that was said, and `--new-len` new
tokens. The clients run on the same processors. Prints the median over rounds, and the least and the
most. Arguments after -- go to both servers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
from start_up import Start


class Turn(NamedTuple):
    """What a client saw of one turn."""

    ttft_s: float
    num_tokens: int


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=8, help="at once")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--first-len", type=int, default=256, help="tokens of first prompts")
    parser.add_argument("--new-len", type=int, default=64, help="tokens that each turn adds")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=256, help="ids of prompts stay below it")
    own, _, serve = " ".join(["", *sys.argv[1:]]).partition(" -- ")
    options = parser.parse_args(own.split())
    options.serve = serve.split()
    return options


def converse(options: argparse.Namespace, url: str, number: int) -> list[Turn]:
    """One client's conversation."""
    draw = random.Random(number)
    said: list[int] = []
    turns = []
    with httpx.Client(base_url=url, timeout=600) as client:
        for turn in range(options.turns):
            length = options.new_len if turn else options.first_len
            said += [draw.randrange(100, options.vocab_size) for _ in range(length)]
            body = {
                "prompt": said,
                "max_tokens": options.output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            answer: list[int] = []
            ttft_s = 0.0
            began = time.perf_counter()
            with client.stream("POST", "/v1/completions", json=body) as stream:
                for line in stream.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise SystemExit(f"a request failed: {event['error']}")
                    for choice in event["choices"]:
                        if choice.get("token_ids") and not answer:
                            ttft_s = time.perf_counter() - began
                        answer += choice.get("token_ids") or []
            turns.append(Turn(ttft_s, len(answer)))
            said += answer
    return turns


def measure(options: argparse.Namespace, num_engines: int) -> dict[str, float]:
    """Start a server, hold the conversations, end it."""
    threads = options.engines * options.threads // num_engines
    serve = ["--data-parallel-size", str(num_engines), "--num-threads", str(threads)]
    server = Start(
        argparse.Namespace(model=options.model, tensor_library="", serve=[*serve, *options.serve])
    )
    try:
        server.wait_ready()
        for _ in range(2 * num_engines):
            server.first_token()
        before = cached_and_asked(server.url)
        began = time.perf_counter()
        with ThreadPoolExecutor(options.conversations) as clients:
            numbers = range(options.conversations)
            jobs = [clients.submit(converse, options, server.url, n) for n in numbers]
            turns = [turn for job in jobs for turn in job.result()]
        elapsed = time.perf_counter() - began
        cached, asked = (
            new - old for new, old in zip(cached_and_asked(server.url), before, strict=True)
        )
    finally:
        server.stop()
    waits = sorted(turn.ttft_s for turn in turns)
    return {
        "output tokens/s": sum(turn.num_tokens for turn in turns) / elapsed,
        "TTFT p50, ms": 1000 * statistics.median(waits),
        "TTFT p90, ms": 1000 * waits[len(waits) * 9 // 10],
        "prefix hits, %": 100 * cached / asked,
    }


def cached_and_asked(url: str) -> tuple[float, float]:
    """Prompt tokens found in caches, and all; of all engines together."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    names = ("prefix_cache_token_num_total", "prefix_cache_query_tokens_total")
    found = [re.search(rf"^fastdeploy:{n}{{model_name[^}}]*}} (\S+)$", text, re.M) for n in names]
    cached, asked = (float(match[1]) if match else 0.0 for match in found)
    return cached, asked


def main() -> None:
    """Run and print."""
    options = parse_arguments()
    kinds = {1: f"1 engine x {options.engines * options.threads} threads"}
    kinds[options.engines] = f"{options.engines} engines x {options.threads} threads"
    print(
        f"{options.model} {' '.join(options.serve)}: {options.conversations} conversations of "
        f"{options.turns} turns, {options.first_len} + {options.new_len} per turn tokens in, "
        f"{options.output_len} out; {options.rounds} rounds, {os.cpu_count()} cores shared with "
        f"the clients, load before {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}",
        flush=True,
    )
    rounds: dict[int, list[dict[str, float]]] = {count: [] for count in kinds}
    for _ in range(options.rounds):
        for count in kinds:
            rounds[count].append(measure(options, count))
    names = list(rounds[1][0])
    print(f"{'median (least, most)':>24}" + "".join(f"{name:>28}" for name in names))
    for count, title in kinds.items():
        cells = []
        for name in names:
            values = [each[name] for each in rounds[count]]
            cells.append(f"{statistics.median(values):.1f} ({min(values):.1f}, {max(values):.1f})")
        print(f"{title:>24}" + "".join(f"{cell:>28}" for cell in cells))


if __name__ == "__main__":
    main()
