"""What prefill and decode apart cost and bring: two servers that hand prompts over, beside one of
them alone and beside both as mixed instances.

    python benchmarks/prefill_apart.py models/ernie-tiny
    python benchmarks/prefill_apart.py MODEL --prompt-tokens 2048 8192 -- --load-format dummy

Starts two servers and a router (fd-router, fd-scale-out, fd-kv-shm). Each run measures three ways,
in an order that changes from run to run; the servers stay, and change their roles in between:

  one    the server that computes prompts when apart is asked directly, the other one is idle
  mixed  the router divides requests between both
  apart  one computes prompts, the other one writes answers

Quiet: the time to the first and second token of prompts that come one after the other, for each
length; apart, the second one needs the blocks.
Busy: answers are being written while prompts of the last length come; the times between two tokens
of these answers, and to the prompts' first tokens. Left out with `--streams 0`: many short turns
(`--runs 20 --prompts 2`) then tell small differences of the quiet ones from a machine's moods.
Prompts are random, so none is cached.
Printed are medians over the runs, and ratios. What follows `--` goes to both servers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import secrets
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

from figures import add_json_option, print_figures

START_S = 180.0
STREAM_TOKENS = 3000  # of an answer that is being written; another one follows
ANSWER_TOKENS = 4  # of each prompt
SECRET = secrets.token_hex(32)
ROLES = {"mixed": ("mixed", "mixed"), "apart": ("prefill", "decode")}
WAYS = ("one", "mixed", "apart")
_URL = re.compile(r"(?:serving .* at|routing at) (http://\S+)")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Options, and the words for both servers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--threads", type=int, default=1, help="of each server, on a CPU")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--prompts", type=int, default=5, help="of each length, a run and a way")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4, help="answers that are being written")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two prompts")
    parser.add_argument("--kv-transport", default="shm")
    parser.add_argument(
        "--each",
        action="append",
        default=[],
        metavar="NAME=FIRST/SECOND",
        help="environment of either server, such as CUDA_VISIBLE_DEVICES=0,1/1,0",
    )
    add_json_option(parser)
    words = [*sys.argv[1:], "--"]
    at = words.index("--")
    return parser.parse_args(words[:at]), words[at + 1 : -1]


@contextmanager
def running(*words: str, **environment: str) -> Iterator[str]:
    """A command of `fastdeploy`; its URL once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fastdeploy_core.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"FD_KV_SECRET": SECRET} | environment,
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


def call(url: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
    """What a route answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


def ask(
    url: str, prompt: list[int], num_tokens: int, end: threading.Event | None = None
) -> list[float]:
    """When each event of the answer came, until its end or until `end` is set."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    # Tokens without a text, as made-up weights choose, have an event then, too.
    body["return_token_ids"] = True
    request = urllib.request.Request(
        url + "/v1/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    times = []
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
            if end is not None and end.is_set():
                break
    return times


class Servers:
    """Two servers and a router, whose roles change."""

    def __init__(self, options: argparse.Namespace, words: list[str], stack: ExitStack) -> None:
        longest = max(options.prompt_tokens)
        serve = ["serve", options.model, "--port", "0", "--num-threads", str(options.threads)]
        serve += ["--max-model-len", str(max(4096, 2 * longest))]
        serve += ["--kv-transport", options.kv_transport, *words]
        each: list[dict[str, str]] = [{}, {}]
        for name, _, values in (text.partition("=") for text in options.each):
            for own, value in zip(each, values.split("/"), strict=True):
                own[name] = value
        # One after the other: on one device each measures how much memory is left.
        self.urls = [stack.enter_context(running(*serve, **one)) for one in each]
        router = ["router", "--port", "0", "--admin-key", "admin", "--probe-interval", "0.1"]
        router += ["--instances", *self.urls]
        self.router = stack.enter_context(running(*router))
        self.changes_s: list[float] = []  # of roles

    def url(self, way: str) -> str:
        """Where requests go, once the roles are in force."""
        if way == "one":
            return self.urls[0]
        for url, role in zip(self.urls, ROLES[way], strict=True):
            began = time.perf_counter()
            call(url + "/kv_handover", {"role": role}, **{"X-KV-Secret": SECRET})
            self.changes_s.append(time.perf_counter() - began)
        wait_until(lambda: self.roles() == list(ROLES[way]), "the router to know the roles")
        return self.router

    def roles(self) -> list[str]:
        """Of the servers that the router finds ready."""
        found = call(self.router + "/admin/instances", Authorization="Bearer admin")
        return [one["role"] for one in found if one["state"] == "ready"]

    def num_taken(self) -> float:
        """Prompts that were handed over."""
        with urllib.request.urlopen(self.urls[1] + "/metrics", timeout=20) as answer:
            lines = re.findall(rb"^fastdeploy:kv_taken_over_total\S* (\S+)", answer.read(), re.M)
        return sum(map(float, lines))


def wait_until(done: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    """Poll; ends the program if it takes too long."""
    end = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > end:
            sys.exit(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.05)


def quiet(url: str, prompts: list[list[int]]) -> list[tuple[float, float]]:
    """Seconds to each prompt's first and second token."""
    found = []
    for prompt in prompts:
        began = time.perf_counter()
        times = ask(url, prompt, ANSWER_TOKENS)
        second = times[min(1, len(times) - 1)]  # one event brings what is there by then
        found.append((times[0] - began, second - began))
    return found


def busy(
    options: argparse.Namespace, url: str, prompts: list[list[int]]
) -> tuple[list[float], list[float]]:
    """Seconds between tokens of the streams while prompts come, and to the prompts' first
    tokens."""
    end, firsts = threading.Event(), list[float]()

    def stream(number: int) -> list[list[float]]:
        """One answer after the other to a short prompt, which is computed where it comes."""
        answers = []
        while not end.is_set():
            answers.append(ask(url, [9, 5 + number], STREAM_TOKENS, end))
        return answers

    with ThreadPoolExecutor(options.streams) as threads:
        streams = [threads.submit(stream, number) for number in range(options.streams)]
        try:
            time.sleep(1)
            began = time.perf_counter()
            for prompt in prompts:
                firsts += [first for first, _ in quiet(url, [prompt])]
                time.sleep(options.pause)
            ended = time.perf_counter()
        finally:
            end.set()
    gaps = [
        later - before
        for one in streams
        for times in one.result()
        for before, later in pairwise(times)
        if began <= before and later <= ended
    ]
    if len(gaps) < 2:
        sys.exit(f"{len(gaps)} tokens came while prompts were computed; more --prompts are needed")
    return gaps, firsts


def one_run(
    options: argparse.Namespace, servers: Servers, number: int, found: dict[str, list[float]]
) -> None:
    """Adds a value to each figure."""
    rng = random.Random(number)

    def prompts(size: int) -> list[list[int]]:
        return [[rng.randrange(5, 250) for _ in range(size)] for _ in range(options.prompts)]

    for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
        url, before = servers.url(way), servers.num_taken()
        quiet(url, prompts(max(options.prompt_tokens))[:1])
        for size in options.prompt_tokens:
            pairs = zip(*quiet(url, prompts(size)), strict=True)
            for name, seconds in zip(("first", "second"), pairs, strict=True):
                found[f"{way}, quiet, {name} token of {size}, s"].append(statistics.median(seconds))
        if options.streams:
            gaps, firsts = busy(options, url, prompts(options.prompt_tokens[-1]))
            cuts = statistics.quantiles(gaps, n=100, method="inclusive")
            found[f"{way}, busy, between tokens p50, s"].append(cuts[49])
            found[f"{way}, busy, between tokens p99, s"].append(cuts[98])
            found[f"{way}, busy, first token, s"].append(statistics.median(firsts))
        text = ", ".join(f"{v[-1]:.4f}" for name, v in found.items() if name.startswith(way))
        print(f"run {number + 1} of {options.runs}, {way}: {text}", file=sys.stderr, flush=True)
        num_asked = 1 + options.prompts * (bool(options.streams) + len(options.prompt_tokens))
        expected = before + (num_asked if way == "apart" else 0)
        text = f"{num_asked} prompts to be handed over, or none where none should"
        wait_until(lambda expected=expected: servers.num_taken() == expected, text, 5.0)


def show(
    options: argparse.Namespace, figures: dict[str, list[float]], changes_s: list[float]
) -> None:
    """A table of medians: ways as columns, and what is apart in relation to both others."""
    print(f"{options.model}, {options.kv_transport}, threads of each server: {options.threads}")
    print(f"{platform.machine()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    print(f"{options.runs} runs, {options.prompts} prompts each, {options.streams} streams")
    print(f"{len(changes_s)} times a role was set, in {max(changes_s):.2f} s at most")
    heads = (*WAYS, "apart/one", "apart/mixed")
    print(f"{'median over runs':32}" + "".join(f"{head:>13}" for head in heads))
    for name in [name.removeprefix("one, ") for name in figures if name.startswith("one, ")]:
        one, mixed, apart = (statistics.median(figures[f"{way}, {name}"]) for way in WAYS)
        cells = [f"{value:13.4f}" for value in (one, mixed, apart)]
        print(f"{name:32}" + "".join(cells) + f"{apart / one:13.2f}{apart / mixed:13.2f}")


def main() -> None:
    """Measure and print."""
    options, words = parse_arguments()
    figures: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        began = time.monotonic()
        servers = Servers(options, words, stack)
        wait_until(lambda: len(servers.roles()) == 2, "both servers")
        print(f"both serve after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        for number in range(options.runs):
            one_run(options, servers, number, figures)
    show(options, figures, servers.changes_s)
    print_figures(options, figures)


if __name__ == "__main__":
    main()
