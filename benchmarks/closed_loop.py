"""Tokens per second of a model in several formats under one steady load, a closed loop.

    python benchmarks/closed_loop.py MODEL --streams 256 --variant bf16 \\
        --variant "WINT4 --quantization wint4" -- --load-format dummy --max-model-len 2304

Each variant is a name and what its server gets beside the arguments after --; servers are started
one after the other, or with `--at-once` all of them before the first is measured. So many streams
send a request each, and the next one when it is answered: random ids, greedy, answers of a fixed
length. Each begins at a random place of its first answer, and what it would have got until then is
part of its prompt: from the start, steps are what they are after hours. What the engine generates
is counted (/metrics) over `--seconds` that begin `--settle` seconds after every stream has its
first token. Ratios are to the first variant. The last columns are what this client, the engine's
process and the API server take of a processor: near 100 % one of them is what is measured.
plugins/fd-cuda/benchmarks/steady.py is the same load without HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import signal
import sys
import time
import urllib.request
from pathlib import Path

from start_up import Start, family, processor_s

COUNTERS = ("generation_tokens", "prompt_tokens", "engine_steps", "request_preempted")
FIRST_TOKENS = "time_to_first_token_seconds_count"
PROCESSES = ("client", "engine", "API server")
BUSY = 0.8  # of a processor: a client that takes more may be the limit


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--variant", action="append", required=True, metavar="'NAME ARGUMENTS'")
    parser.add_argument("--streams", type=int, nargs="+", default=[256])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=1024)
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens of an event")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--settle", type=float, default=2.0)
    parser.add_argument("--at-once", action="store_true", help="where there is memory for all")
    words = [*sys.argv[1:], "--"]
    end = words.index("--")
    options = parser.parse_args(words[:end])
    most = max(options.streams)
    options.serve = [*words[end + 1 : -1], "--no-enable-prefix-caching"]
    options.serve += ["--max-num-seqs", str(most), "--max-concurrency", str(2 * most)]
    options.tensor_library = ""
    return options


def counters(url: str) -> dict[str, float]:
    """The engine's counters now, and the time."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = {}
    for name in (*COUNTERS, FIRST_TOKENS):
        match = re.search(rf"^fastdeploy:{name}(?:_total)?(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        found[name] = float(match[1]) if match else 0.0
    return {**found, "time": time.perf_counter()}


def processors_s(pid: int) -> list[float]:
    """Seconds of processor time so far, by PROCESSES. pid: the server's."""
    own, engine = time.process_time(), 0.0
    for process in family(pid):
        if b"fastdeploy-engine" in Path(f"/proc/{process}/cmdline").read_bytes():
            engine = processor_s(process)
            break
    return [own, engine, processor_s(pid) - engine]


async def stream(url: str, seed: int, vocabulary: int, options: argparse.Namespace) -> None:
    """Requests one after the other, until it is cancelled."""
    from fd_bench.client import BenchClient
    from fd_bench.data import LOWEST_RANDOM_ID

    draw = random.Random(seed)
    client = BenchClient(url, "")
    got = draw.randrange(options.output_len)
    while True:
        number = options.input_len + got
        ids = draw.choices(range(LOWEST_RANDOM_ID, vocabulary), k=number)
        body = {
            "prompt": ids, "max_tokens": options.output_len - got, "temperature": 0.0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
            "stream_interval": options.stream_interval,
        }  # fmt: skip
        measured = await client.measure("/v1/completions", body)
        if measured.error:
            raise RuntimeError(measured.error)
        got = 0


async def load(server: Start, streams: int, options: argparse.Namespace) -> dict[str, float]:
    """What the engine did per second while so many streams were open."""
    config, url = json.loads((Path(options.model) / "config.json").read_text()), server.url
    before = await asyncio.to_thread(counters, url)
    tasks = [
        asyncio.create_task(stream(url, seed, config["vocab_size"], options))
        for seed in range(streams)
    ]
    try:
        now = before
        while now[FIRST_TOKENS] < before[FIRST_TOKENS] + streams:
            await asyncio.sleep(0.2)
            now = await asyncio.to_thread(counters, url)
            failed(tasks)
        await asyncio.sleep(options.settle)
        spent = processors_s(server.process.pid)
        began = await asyncio.to_thread(counters, url)
        await asyncio.sleep(options.seconds)
        ended = await asyncio.to_thread(counters, url)
        took = zip(PROCESSES, spent, processors_s(server.process.pid), strict=True)
        failed(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    seconds = ended["time"] - began["time"]
    rates = {name: (ended[name] - began[name]) / seconds for name in COUNTERS}
    return rates | {name: (after - before) / seconds for name, before, after in took}


def failed(tasks: list[asyncio.Task[None]]) -> None:
    """Raise what ended a stream."""
    for task in tasks:
        if task.done():
            task.result()


def main() -> None:
    """Start, load, print."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server is ended then, too
    print(
        f"{Path(options.model).name}: {options.input_len} tokens in, {options.output_len} out, "
        f"{options.seconds:g} s in a steady closed loop, {len(os.sched_getaffinity(0))} cores, "
        f"{time.strftime('%Y-%m-%d')}"
    )
    print(
        f"{'':14}{'streams':>8}{'output tokens/s':>17}{'of the first':>14}{'prompt tokens/s':>17}"
        f"{'steps/s':>9}{'preempted/s':>13}{''.join(f'{name:>12}' for name in PROCESSES)}",
        flush=True,
    )
    first: dict[int, float] = {}
    with contextlib.ExitStack() as stack:
        ahead = options.variant if options.at_once else []
        started = [start(variant, options, stack) for variant in ahead]
        for server in started:
            server.wait_ready()
        for number, variant in enumerate(options.variant):
            server = started[number] if started else start(variant, options, stack)
            server.wait_ready()
            for streams in options.streams:
                rate = asyncio.run(load(server, streams, options))
                show(shlex.split(variant)[0], streams, rate, first)
            server.stop()  # others may need its memory


def start(variant: str, options: argparse.Namespace, stack: contextlib.ExitStack) -> Start:
    """A variant's server, which ends with the stack at the latest."""
    _, *more = shlex.split(variant)
    server = Start(argparse.Namespace(**{**vars(options), "serve": [*more, *options.serve]}))
    stack.callback(server.stop)
    return server


def show(name: str, streams: int, rate: dict[str, float], first: dict[int, float]) -> None:
    """One row."""
    tokens = rate["generation_tokens"]
    share = tokens / max(1e-9, first.setdefault(streams, tokens))
    print(
        f"{name:14}{streams:>8}{tokens:>17,.0f}{share:>14.3f}{rate['prompt_tokens']:>17,.0f}"
        f"{rate['engine_steps']:>9.1f}{rate['request_preempted']:>13.2f}"
        f"{''.join(f'{rate[process]:>12.0%}' for process in PROCESSES)}",
        flush=True,
    )
    if rate["client"] > BUSY:
        print(f"{'':14}this client was busy for {rate['client']:.0%} of the time", flush=True)


if __name__ == "__main__":
    main()
