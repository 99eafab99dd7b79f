"""What long prompts do to answers that are being written: one server, and prefill apart.

    python benchmarks/prefill_apart.py models/ernie-tiny
    python benchmarks/prefill_apart.py MODEL --prompt-tokens 4000 --threads 8

Starts one server on all threads, and after it two servers on half of them each with a router in
front (fd-router, fd-kv-disk). Streams are read token by token while long prompts come, one after
the other; printed are the times between two tokens of a stream, and to a long prompt's first token.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise

from figures import add_json_option, print_figures

START_S = 120.0
_URL = re.compile(r"(?:serving .* at|routing at) (http://\S+)")


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--threads", type=int, default=2, help="of both servers together")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two prompts")
    add_json_option(parser)
    return parser.parse_args()


@contextmanager
def running(*words: str) -> Iterator[str]:
    """A command of `fastdeploy`; its URL once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fastdeploy_core.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := _URL.search(line):
                break
        else:
            sys.exit("".join(lines))
        rest = process.stdout
        threading.Thread(target=lambda: [None for _ in rest], daemon=True).start()
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)


def ask(
    url: str, prompt: list[int], num_tokens: int, end: threading.Event | None = None
) -> list[float]:
    """When each event of the answer came, until its end or until `end` is set."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times = []
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
            if end is not None and end.is_set():
                break
    return times


def measure(options: argparse.Namespace, url: str) -> dict[str, list[float]]:
    """Times between tokens of the streams while prompts come, and to the prompts' first tokens."""
    rng, size = random.Random(0), options.prompt_tokens
    prompts = [[rng.randrange(5, 250) for _ in range(size)] for _ in range(options.prompts)]
    ask(url, prompts[0][:300], 4)
    end, firsts = threading.Event(), []
    threads = ThreadPoolExecutor(options.streams)
    streams = [threads.submit(ask, url, [9, n], 3000, end) for n in range(options.streams)]
    time.sleep(2)
    began = time.perf_counter()
    for prompt in prompts:
        started = time.perf_counter()
        firsts.append(ask(url, prompt, 1)[0] - started)
        time.sleep(options.pause)
    ended = time.perf_counter()
    end.set()
    gaps = [
        later - before
        for stream in streams
        for before, later in pairwise(stream.result())
        if began <= before and later <= ended
    ]
    return {"between tokens": gaps, "to the first token": firsts}


def show(name: str, values: Sequence[float]) -> None:
    """One line."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    print(f"{name:32} p50 {cuts[49]:8.4f}  p99 {cuts[98]:8.4f}  of {len(values)}")


def wait_until_used(url: str, prompt: list[int]) -> None:
    """The router has found its instances."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with suppress(urllib.error.HTTPError):  # 503 before the first probe
            ask(url, prompt, 1)
        with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
            if re.search(rb'router_prefills_total\{[^}]*outcome="200"', answer.read()):
                return
        time.sleep(0.2)
    sys.exit("no prompt came to the prefill instance")


def main() -> None:
    """Measure and print."""
    options, figures = parse_arguments(), {}
    serve = ["serve", options.model, "--port", "0", "--max-model-len", "4096"]
    serve += ["--num-gpu-blocks-override", "600", "--max-num-seqs", "16", "--num-threads"]
    with running(*serve, str(options.threads)) as url:
        figures["one server"] = measure(options, url)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = ["--kv-store", "disk", "--kv-store-config.path", folder, "--swap-space", "0.5"]
        half = [*serve, str(max(1, options.threads // 2)), *store]
        prefill = stack.enter_context(running(*half))
        decode = stack.enter_context(running(*half, "--kv-store-config.wait_s", "0.5"))
        router = ["router", "--port", "0", "--prefill", prefill, "--instances", decode]
        url = stack.enter_context(running(*router))
        wait_until_used(url, list(range(9, 400)))
        figures["prefill apart"] = measure(options, url)
    for way, found in figures.items():
        for what, values in found.items():
            show(f"{way}, {what}, s", values)
    flat = {f"{way}, {what}, s": v for way, found in figures.items() for what, v in found.items()}
    print_figures(options, flat)


if __name__ == "__main__":
    main()
