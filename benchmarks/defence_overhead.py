"""What the bounds on hostile requests cost normal ones: two servers get the same requests in turns.

    python benchmarks/defence_overhead.py models/ernie-tiny --seconds 60
    python benchmarks/defence_overhead.py models/ernie-tiny --seconds 60 --starts 5

One server is as it is, of the other every bound is taken away that under_attack.py has an attack
on, and texts of users may hold special tokens, and keys share cached prefixes. The device does
nothing. Per kind of request: processor time of the server's processes and time until the answer,
each as the median of the ratios of neighbouring turns, with its standard error, and as the ratio of
the least that either side took. Turns are a few tens of milliseconds long, so what else the machine
does meets both. With --starts, servers are also started in turns: these take seconds, and what else
the machine does only adds, so the least says more.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
from figures import add_json_option, print_figures
from http_overhead import null_model
from start_up import Start, family
from under_attack import CHAT, DEFENCES, TEXT, running

STEP_MS = 0.5  # so that how many tokens come at once does not depend on the server's speed
AT_ONCE = 8
WORDS = "The quick brown fox jumps over the lazy dog. "
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}},
}
TURNS = [
    {"role": "system", "content": WORDS * 4},
    *({"role": role, "content": WORDS * 8} for role in ("user", "assistant") * 3),
    {"role": "user", "content": "And then?"},
]
COMMON = {"temperature": 0, "ignore_eos": True}
# Kind to route, body, and how many of them are sent in a turn, AT_ONCE at a time.
REQUESTS = {
    "chat, streamed": (CHAT, {"messages": TURNS, "max_tokens": 64, "stream": True}, AT_ONCE),
    "short chat": (CHAT, {"messages": [TURNS[-1]], "max_tokens": 2}, 4 * AT_ONCE),
    "chat with a tool": (CHAT, {"messages": TURNS, "tools": [TOOL], "max_tokens": 2}, 2 * AT_ONCE),
    "text of 15,000 characters": (TEXT, {"prompt": WORDS * 333, "max_tokens": 2}, AT_ONCE),
}
_WITHOUT = """
from fastdeploy_core.serving.http import json_body
json_body._look = lambda raw: (
    json_body._SUSPECT_NUMBER.search(raw) is not None,
    raw.count(b"[") + raw.count(b"{") > json_body.MAX_DEPTH,
)
import fastdeploy_core.engine.step_time as step_time
step_time.StepTime.most_prompt_tokens = lambda self, number: (2**31, False)
step_time.StepTime.is_awaited = lambda self, step: False
step_time.StepTime.note = lambda self, step, seconds: None
"""
TRUST = ("--trust-special-tokens", "--share-prefix-cache")
# Only these processes of a server run requests; the others would import what they do not need.
PATCH = """
_line = open("/proc/self/cmdline").read()
if "cli.main\\0serve" in _line or "sys.path[:]" in _line:
    exec({code!r})
"""


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder, of which only the tokenizer is used")
    parser.add_argument("--tensor-library", default="", choices=["", "torch", "paddle"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--starts", type=int, default=0, help="of each server; 0 (none), or 2 and more"
    )
    add_json_option(parser)
    options = parser.parse_args()
    if options.starts < 0 or options.starts == 1:
        parser.error(f"--starts {options.starts}: 0, or at least 2, since ratios are compared")
    return options


def spent_s(pid: int) -> float:
    """Processor time of a process and all below it."""
    files = (file for p in family(pid) for file in Path(f"/proc/{p}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


class Side:
    """One of the two servers, and a client of it."""

    def __init__(self, server: Start) -> None:
        self._pid = server.process.pid
        self._client = httpx.Client(base_url=server.url, timeout=60)

    def turn(self, kind: str, threads: ThreadPoolExecutor) -> tuple[float, float]:
        """Seconds of processor time, and seconds, of one turn."""
        path, body, count = REQUESTS[kind]
        spent, began = spent_s(self._pid), time.perf_counter()
        for answer in threads.map(
            lambda _: self._client.post(path, json={**COMMON, **body}), range(count)
        ):
            assert answer.status_code == 200, answer.text
        return spent_s(self._pid) - spent, time.perf_counter() - began


def show(what: str, without: list[float], with_all: list[float]) -> list[float]:
    """A row; the ratios."""
    ratios = sorted(b / a for a, b in zip(without, with_all, strict=True) if a)
    low, _, high = statistics.quantiles(ratios, n=4)
    error = 0.93 * (high - low) / len(ratios) ** 0.5
    medians = (1000 * statistics.median(values) for values in (without, with_all))
    cells = "".join(f"{value:12.2f}" for value in medians)
    ratio = statistics.median(ratios)
    least = min(with_all) / min(without)
    print(f"{what:44}{len(ratios):6}{cells}{ratio:9.3f} +- {error:.3f}{least:8.3f}", flush=True)
    return ratios


def in_turns(
    seconds: float, least: int, units: list[str], turn: Callable[[int, str], tuple[float, ...]]
) -> dict[str, list[list[tuple[float, ...]]]]:
    """By unit, for each of the two sides, what its turns took; the first of each does not count."""
    found: dict[str, list[list[tuple[float, ...]]]] = {unit: [[], []] for unit in units}
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until or number <= least:
        for unit in units:
            for side in (0, 1) if number % 2 else (1, 0):
                taken = turn(side, unit)
                if number:
                    found[unit][side].append(taken)
        number += 1
    return found


def start(options: argparse.Namespace, patch: str) -> tuple[float, float]:
    """Processor time and time of a start until the first token."""
    before = os.times()
    with running(options, patch) as server:
        first_s = time.perf_counter() - server.began
    after = os.times()
    used = after.children_user + after.children_system
    return used - before.children_user - before.children_system, first_s


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}\n"
        f"{'':44}{'turns':>6}{'without, ms':>12}{'with, ms':>12}{'ratio':>9}{'least':>17}"
    )
    figures: dict[str, list[float]] = {}
    code = "\n".join([*DEFENCES.values(), _WITHOUT])
    # Both import the same modules when they start.
    imports = [line for line in code.splitlines() if line.startswith(("import ", "from "))]
    imported = "\n".join(line.partition(";")[0] for line in imports)
    patches = (PATCH.format(code=code), PATCH.format(code=imported))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        null_model(options.model, Path(name), STEP_MS)
        for file in Path(options.model).glob("chat_template*"):
            shutil.copy(file, name)
        options.model = name
        options.serve = ["--device", "null"]
        both = [copy.copy(options), options]
        both[0].serve = [*options.serve, *TRUST]
        pairs = list(zip(both, patches, strict=True))
        sides = [Side(stack.enter_context(running(*pair))) for pair in pairs]
        threads = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        kinds = [*REQUESTS]
        found = in_turns(options.seconds, 2, kinds, lambda n, kind: sides[n].turn(kind, threads))
        if options.starts:
            found |= in_turns(0.0, options.starts, ["start"], lambda n, _: start(*pairs[n]))
    for unit, taken in found.items():
        for place, what in enumerate(("processor", "wall")):
            values = [[turn[place] for turn in side] for side in taken]
            figures[f"{unit}: {what}, with / without"] = show(f"{unit}: {what}", *values)
    print_figures(options, figures)


if __name__ == "__main__":
    main()
