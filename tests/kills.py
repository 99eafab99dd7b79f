"""kill -9 at random moments over every process of real servers, under load.

    python -m tests.kills --kills 1000
    python -m tests.kills --kills 1000 --lanes 12
    python -m tests.kills --kills 100 --layout "two API servers" --together 0.5

Servers of several layouts run a fake model whose tokens are known; --lanes of them at once. While
clients ask, a process is chosen and killed: an engine, a worker rank, an API server, or the parent
of all. The next one is killed when the server is ready again or, with --together, at most so many
seconds later, whatever is being started then. Counted are requests that were lost (no end, no
error, and the connection not broken by the death of what held it), answered twice or wrongly, and
blocks that stay in use when all is over.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import httpx

from fastdeploy_core.types import SamplingParams
from fastdeploy_testing.fakes import NullModel
from tests.server_process import serving
from tests.server_support import lines, wait_for, write_null_model

NULL = ("--device", "null", "--block-size", "16", "--max-num-seqs", "8", "--max-restarts", "1000")
LAYOUTS = {
    "one engine": (),
    "two API servers": ("--api-server-count", "2"),
    "two engines": ("--data-parallel-size", "2"),
    "two ranks": ("--tensor-parallel-size", "2"),
    "two of each": ("--api-server-count", "2", "--data-parallel-size", "2"),
}
NAMES = {b"fastdeploy-engine": "engine", b"fastdeploy-api": "API server", b"fd-rank": "rank"}
KILLS_PER_SERVER = 3  # an API server is started again so often in a minute
NUM_CLIENTS = 6
PATIENCE_S = 120.0
PAUSE_S = 1.5  # at most, before a kill
END_S = 10.0  # for what was below a killed process
BROKEN = "connection broken"
BAD = ("lost", "twice", "wrong", "blocks leaked", "not ready again", "left behind")


class Load:
    """Clients that ask without a pause, and what they were answered."""

    def __init__(self, url: str, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self.breaks: list[str] = []  # how connections broke
        self._url = url
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random((seed << 8) + number),))
            for number in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End when each client has its answer."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, draw: random.Random) -> None:
        # A connection for each request: one that was kept may end with a process that is killed.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S, limits=limits) as client:
            while not self._stopping.is_set():
                outcome = ask(client, draw, self.breaks)
                self.seen[outcome] += 1
                if outcome in (BROKEN, "error"):
                    time.sleep(0.05)


def ask(client: httpx.Client, draw: random.Random, breaks: list[str]) -> str:
    """One request: how it ended, and how its connection broke."""
    prompt = [draw.randrange(200) for _ in range(draw.randrange(1, 40))]
    count, stream = draw.randrange(1, 60), draw.random() < 0.5
    expected = NullModel(259).expected(prompt, count, SamplingParams(temperature=0.0))
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "stream": stream}
    tokens: list[int] = []
    has_error = is_done = False
    try:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return "error"
            if not stream:
                tokens = json.loads(answer.read())["choices"][0]["token_ids"]
                return _compared(tokens, expected)
            for line in lines(answer):
                is_done |= line == "data: [DONE]"
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                has_error |= "error" in event
                for choice in event.get("choices", ()):
                    tokens += choice.get("token_ids") or []
    except httpx.TimeoutException as error:
        breaks.append(f"{error!r} after {len(tokens)} of {count} tokens, streamed: {stream}")
        return "lost"
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        breaks.append(f"{error!r} after {len(tokens)} of {count} tokens, streamed: {stream}")
        return BROKEN if tokens == expected[: len(tokens)] else "wrong"
    if has_error:
        return "error" if tokens == expected[: len(tokens)] else "wrong"
    if not is_done:
        breaks.append(f"no [DONE] after {len(tokens)} of {count} tokens")
    return _compared(tokens, expected) if is_done else BROKEN


def _compared(tokens: list[int], expected: list[int]) -> str:
    if tokens == expected:
        return "whole"
    return "twice" if len(tokens) > len(expected) else "wrong"


def processes(top: int) -> dict[int, str]:
    """A server's process and all below it by id, with what each is."""
    found, ring = {top: "parent"}, [top]
    while ring:
        for listed in Path(f"/proc/{ring.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread has just ended
                for child in map(int, listed.read_text().split()):
                    ring.append(child)
                    with contextlib.suppress(OSError):  # the child has
                        line = Path(f"/proc/{child}/cmdline").read_bytes()
                        found[child] = next(
                            (n for key, n in NAMES.items() if key in line), "helper"
                        )
    return found


def left_behind(doomed: dict[int, str]) -> list[str]:
    """Of processes whose parent was killed, those that have not ended in time, and how they are."""

    def living() -> list[int]:
        return [pid for pid in doomed if Path(f"/proc/{pid}/exe").exists()]

    with contextlib.suppress(AssertionError):
        wait_for(lambda: not living(), "their end", END_S)
    found = []
    for pid in living():
        with contextlib.suppress(OSError):  # it has just ended
            state = Path(f"/proc/{pid}/status").read_text().split("State:")[1].split("\n")[0]
            waits = Path(f"/proc/{pid}/wchan").read_text()
            found.append(f"{doomed[pid]} {pid}: {' '.join(state.split())}, in {waits}")
    return found


def gauge(url: str, name: str) -> float:
    """A number that the server reports; infinite if it reports none."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=30).text
    except httpx.HTTPError:
        return float("inf")
    match = re.search(rf"^fastdeploy:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return float(match[1]) if match else 0.0


def is_ready(url: str) -> bool:
    """Whether requests are taken."""
    try:
        return httpx.get(f"{url}/health/ready", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def play(
    model: Path, layout: str, seed: int, most: int, together_s: float | None = None
) -> Counter[str]:
    """One server, with up to `most` kills; what was seen. together_s: the most between two kills,
    which then do not wait until the server is ready."""
    draw, seen = random.Random(seed), Counter[str]()
    with serving(model, *NULL, *LAYOUTS[layout]) as server, Load(server.url, seed) as load:
        url = server.url
        killed: set[str] = set()
        while num_killed(seen) < most:
            time.sleep((PAUSE_S if together_s is None else together_s) * draw.random())
            alive = processes(server.process.pid)
            others = [process for process in alive if process != server.process.pid]
            pid = server.process.pid if draw.random() < 0.1 or not others else draw.choice(others)
            doomed = {below: alive.get(below, "new") for below in processes(pid) if below != pid}
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # a helper that has just ended
            killed.add(alive[pid])
            seen[f"killed: {alive[pid]}"] += 1
            if pid == server.process.pid:
                server.process.wait(PATIENCE_S)
            for process in left_behind(doomed):
                print(f"seed {seed}, {layout}, {alive[pid]} killed: left {process}", flush=True)
                seen["left behind"] += 1
            if pid == server.process.pid:
                break
            if together_s is not None and num_killed(seen) < most:
                continue
            try:
                wait_for(lambda: is_ready(url), "it to be ready", PATIENCE_S)
            except AssertionError:
                seen["not ready again"] += 1
                break
        load.stop()
        seen += load.seen
        # nobody else may break a connection
        if not killed & {"API server", "parent"}:
            seen["lost"] += seen.pop(BROKEN, 0)
        if seen["lost"]:
            print(f"seed {seed}, {layout}: {'; '.join(load.breaks)}", flush=True)
        if "parent" not in killed and not seen["not ready again"]:
            try:
                wait_for(lambda: gauge(url, "kv_blocks_used") == 0, "blocks to come back", 20)
            except AssertionError:
                seen["blocks leaked"] += 1
    return seen


def run(
    model: Path,
    num_kills: int,
    first_seed: int = 0,
    num_lanes: int = 1,
    limit_s: float = float("inf"),
    only: str = "",
    together_s: float | None = None,
) -> Counter[str]:
    """At least so many kills, over all layouts in turn or one alone, by so many servers at once.
    After limit_s no further server is started."""
    until_s = time.monotonic() + limit_s
    seen = Counter[str]()
    seeds = (seed for seed in itertools.count(first_seed) if only in ("", layout_of(seed)))
    spawn = multiprocessing.get_context("spawn")

    def is_wanted() -> bool:
        return num_killed(seen) < num_kills and time.monotonic() < until_s

    with ProcessPoolExecutor(num_lanes, spawn) as lanes:
        running: dict[Future[Counter[str]], int] = {}
        while running or is_wanted():
            while len(running) < num_lanes and is_wanted():
                seed = next(seeds)
                most = min(KILLS_PER_SERVER, num_kills - num_killed(seen))
                job = lanes.submit(play, model, layout_of(seed), seed, most, together_s)
                running[job] = seed
            for job in wait(running, return_when=FIRST_COMPLETED).done:
                seed, now = running.pop(job), job.result()
                print(f"seed {seed}, {layout_of(seed)}: {_line(now)}", flush=True)
                seen += now
    return seen


def layout_of(seed: int) -> str:
    """Every seed has its layout, whoever plays it."""
    return [*LAYOUTS][seed % len(LAYOUTS)]


def num_killed(seen: Counter[str]) -> int:
    """Kills of every kind of process."""
    return sum(count for what, count in seen.items() if what.startswith("killed"))


def _line(seen: Counter[str]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(seen.items()))


def main() -> int:
    """Kill and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--lanes", type=int, default=1, help="servers at once")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most, about")
    parser.add_argument("--layout", choices=LAYOUTS, default="", help="this one alone")
    parser.add_argument("--together", type=float, help="seconds between kills, at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_null_model(Path(folder), step_s=0.005, num_blocks=512)
        limit_s = 60 * options.minutes
        seen = run(
            *(model, options.kills, options.first, options.lanes, limit_s),
            *(options.layout, options.together),
        )
    print(f"{num_killed(seen)} kills: {_line(seen)}")
    print(", ".join(f"{what} {seen[what]}" for what in BAD))
    return any(seen[what] for what in BAD)


if __name__ == "__main__":
    sys.exit(main())
