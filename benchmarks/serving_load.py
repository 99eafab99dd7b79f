r"""A server under load: compared with the same engine offline, and at rising request rates.

    python benchmarks/serving_load.py MODEL --streams 256 --rates 20,40,80 -- --load-format dummy
    python benchmarks/serving_load.py MODEL --streams 32 --cpus 0,2 --client-cpus 4,6 \
        -- --device x86

First the engine alone generates for `--num-prompts` prompts, `--streams` at once. Then a server
does so for as many clients. Then the engine alone runs again, because machines change their speed.
Then requests arrive at random (Poisson) for `--seconds` at each rate. Prompts are random ids,
answers have a fixed length, the prefix cache is off. Arguments after -- go to both. With `--cpus`
engine and server run on those processors only; clients too, or on `--client-cpus`. With `--in-turn`
the engine alone stays loaded beside the server and generates before each of its rounds, so that
many short rounds see the same speed of the machine; ratios within rounds are printed, too. `api` is
the processor time per answer of the server's first process (with one API server, that is the API
server).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from start_up import Start

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_CLI = [sys.executable, "-m", "fastdeploy_core.cli.main"]


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--tensor-library", default="", choices=["", "torch", "paddle"])
    parser.add_argument("--streams", type=int, default=256, help="requests at once")
    parser.add_argument("--num-prompts", type=int, default=768)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison with offline")
    parser.add_argument("--in-turn", action="store_true", help="where there is memory for both")
    parser.add_argument("--rates", default="", help="requests per second, several with commas")
    parser.add_argument("--seconds", type=float, default=6.0, help="of arrivals at each rate")
    parser.add_argument("--rate-output-len", type=int, default=128, help="answers at the rates")
    parser.add_argument("--api-server-count", type=int, default=8)
    parser.add_argument("--clients", type=int, default=6, help="client processes")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens in a chunk")
    parser.add_argument("--cpus", default="", help="of engine and server; default: all")
    parser.add_argument("--client-cpus", default="", help="default: those of the server")
    parser.add_argument("--vocab-size", type=int, default=256, help="ids of prompts stay below it")
    own, _, serve = " ".join(["", *sys.argv[1:]]).partition(" -- ")
    options = parser.parse_args(own.split())
    options.engine = [*serve.split(), "--max-num-seqs", str(options.streams)]
    options.engine += ["--no-enable-prefix-caching"]
    if options.tensor_library:
        options.engine += ["--tensor-library", options.tensor_library]
    return options


def move_to(cpus: str) -> None:
    """Run processes started from now on, on these processors; empty: no change."""
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})


def measure(command: list[str]) -> Any:
    """The numbers that a benchmark command saved."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        subprocess.run(
            [*_CLI, "bench", *command, "--save-result", str(file)],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(file.read_text())


class Alone:
    """The engine without a server, in a process of its own that stays loaded."""

    def __init__(self, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=generate, args=(options, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.tokens_per_s()  # warm-up

    def tokens_per_s(self) -> float:
        """Output tokens per second, all prompts at once."""
        self._pipe.send(True)
        return float(self._pipe.recv())

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join()


def once(options: argparse.Namespace) -> float:
    """Output tokens per second of an engine that is started for this measurement."""
    alone = Alone(options)
    try:
        return alone.tokens_per_s()
    finally:
        alone.close()


def generate(options: argparse.Namespace, pipe: Connection) -> None:
    """The engine process's loop."""
    from fd_bench.data import LOWEST_RANDOM_ID

    from fastdeploy_core.api.llm import LLM
    from fastdeploy_core.cli.parsing import parse_table
    from fastdeploy_core.types import SamplingParams

    values, _ = parse_table(
        ["--model", options.model, *options.engine], "engine alone", "", ("engine",)
    )
    draw = random.Random(0)
    ids = range(LOWEST_RANDOM_ID, options.vocab_size)
    prompts = [draw.choices(ids, k=options.input_len) for _ in range(options.num_prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
    with LLM(**values) as llm:
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            elapsed = time.perf_counter() - began
            pipe.send(sum(len(output.outputs[0].token_ids) for output in outputs) / elapsed)


def load(
    options: argparse.Namespace, server: Start, rate: str, count: int, output_len: int
) -> dict[str, Any]:
    """What clients saw at one rate."""
    command = ["serve", "--url", server.url, "--num-prompts", str(count), "--request-rate", rate]
    command += ["--input-len", str(options.input_len), "--output-len", str(output_len)]
    command += ["--num-clients", str(min(options.clients, count)), "--num-warmup", "1"]
    command += ["--vocab-size", str(options.vocab_size)]
    command += ["--stream-interval", str(options.stream_interval)]
    if rate == "inf":
        command += ["--max-concurrency", str(options.streams)]
    before = api_s(server)
    (result,) = measure(command)
    return {**result, "api_ms": 1000 * (api_s(server) - before) / count}


def api_s(server: Start) -> float:
    """Seconds of processor time that the server's first process has taken, without those it
    started."""
    threads = Path(f"/proc/{server.process.pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in threads) / 1e9


def show(name: str, r: dict[str, Any]) -> None:
    """One row of the table."""
    print(
        f"{name:>16} {r['requests_per_s']:>9.1f} {r['output_tokens_per_s']:>10.0f} "
        f"{r['p50_ttft_ms']:>9.1f} {r['p99_ttft_ms']:>9.1f} {r['p50_itl_ms']:>9.2f} "
        f"{r['p99_itl_ms']:>9.2f} {r['api_ms']:>8.2f} {r['failed']:>7}",
        flush=True,
    )


def main() -> None:
    """Run and print."""
    options = parse_arguments()
    move_to(options.cpus)
    beside = Alone(options) if options.in_turn else None
    alone = [once(options) if beside is None else beside.tokens_per_s()]
    print(
        f"{options.model}: {options.input_len} tokens in, {options.output_len} out; "
        f"{options.api_server_count} API servers, {options.clients} clients, {os.cpu_count()} "
        "cores "
        f"(server on {options.cpus or 'all'}, clients on {options.client_cpus or 'the same'}), "
        f"stream interval {options.stream_interval}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}\n"
        f"offline, {options.streams} at once: {alone[0]:.0f} output tokens/s",
        flush=True,
    )
    start = argparse.Namespace(
        model=options.model,
        tensor_library="",
        serve=[
            *options.engine,
            "--max-concurrency",
            "4096",
            "--api-server-count",
            str(options.api_server_count),
        ],
    )
    server = Start(start)
    print(f"server ready after {server.wait_ready():.1f} s", flush=True)
    move_to(options.client_cpus)
    try:
        print(
            f"{'requests/s asked':>16} {'done/s':>9} {'tokens/s':>10} {'TTFT p50':>9} "
            f"{'p99, ms':>9} {'ITL p50':>9} {'p99, ms':>9} {'api, ms':>8} {'failed':>7}"
        )
        speeds, shares = [], []
        for _ in range(options.rounds):
            if beside is not None:
                alone.append(beside.tokens_per_s())
                print(f"{'offline':>16} {'':>9} {alone[-1]:>10.0f}")
            result = load(options, server, "inf", options.num_prompts, options.output_len)
            speeds.append(result["output_tokens_per_s"])
            shares.append(100 * speeds[-1] / alone[-1])
            show(f"{options.streams} at once", result)
        for rate in options.rates.split(",") if options.rates else ():
            count = max(8, round(float(rate) * options.seconds))
            show(rate, load(options, server, rate, count, options.rate_output_len))
    finally:
        server.stop()
    if beside is None:
        move_to(options.cpus)
        alone.append(once(options))
    else:
        beside.close()
        low, high = min(shares), max(shares)
        print(f"in rounds {statistics.median(shares):.1f} % of offline ({low:.0f} to {high:.0f})")
    served, engine = statistics.median(speeds), statistics.median(alone)
    print(
        f"offline {engine:.0f}, at last {alone[-1]:.0f}; server {served:.0f} tokens/s, "
        f"{100 * served / engine:.1f} % of offline (medians)"
    )


if __name__ == "__main__":
    main()
