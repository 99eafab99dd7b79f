r"""What a normal client of a server sees while others attack it, and what the attack leaves behind.

    python benchmarks/under_attack.py models/ernie-tiny --tensor-library torch
    python benchmarks/under_attack.py MODEL --only grammar,biases --seconds 20 -- --max-num-seqs 8
    python benchmarks/under_attack.py MODEL --without-defence

Starts one server. A normal client asks for a short answer, again and again, from a process of its
own: first alone, then under each attack in turn, which other processes send as fast as they can.
Prints per attack the client's p50 and p99, p99 as a multiple of the quiet one, failures, what the
attackers were answered, and by how much the memory of all the server's processes had grown at its
peak and after the attack. The first attack also warms caches up, so all run once before any
counts. Client, attackers and server share the processors. Arguments after -- go to the server.
With --without-defence each attack comes once more, against a server whose one bound on it is taken
away (DEFENCES): what the bound is worth, and whether this table would show that it is gone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from figures import add_json_option, print_figures
from start_up import Start

ROOT = Path(__file__).resolve().parents[1]
SETTLE_S = 3.0  # until freed memory is counted
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HUGE = "a bit of text, " * 500_000
LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]
NUMBER = "4711471147114711"
# Ambiguous: each further letter can be read in more ways.
AMBIGUOUS = 'start: a\na: a a a | a a | b\nb: b b | "a" | "b" | /[ab]+/ | ""\n'
BLOWN_UP = "[ab]*a[ab]{300}"  # each further letter leads to an automaton's state of its own


class Attack(NamedTuple):
    """One kind of hostile request, sent by `senders` processes at once. NUMBER in its body becomes
    another one each time, so that no cache knows it. A number in place of a body: so many seconds
    after its beginning the client leaves; None: it is answered, then resets its connection."""

    senders: int
    path: str
    body: Any


ATTACKS: dict[str, Attack] = {
    "text, to tokenize": Attack(2, "/tokenize", {"prompt": HUGE}),
    "text, to be cut": Attack(
        2, TEXT, {"prompt": HUGE, "truncate_prompt_tokens": -1, "max_tokens": 1}
    ),
    "long prompts": Attack(
        2, TEXT, {"prompt": NUMBER + HUGE[:18_000], "truncate_prompt_tokens": -1, "max_tokens": 1}
    ),
    "ambiguous grammar": Attack(
        4, TEXT, {"prompt": "x", "max_tokens": 64, "structured_outputs": {"grammar": AMBIGUOUS}}
    ),
    "slow masks": Attack(
        4, TEXT, {"prompt": "x", "max_tokens": 64, "structured_outputs": {"regex": BLOWN_UP}}
    ),
    "bad words": Attack(2, TEXT, {"prompt": "x", "bad_words": ["x" * 60_000] * 128}),
    "keys": Attack(2, CHAT, {"messages": HI, "metadata": {f"k{i}": i for i in range(600_000)}}),
    "biases": Attack(2, TEXT, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(300_000)}}),
    "looping templates": Attack(
        4, CHAT, {"messages": [{"role": "user", "content": "x" * 5000}], "chat_template": LOOP}
    ),
    "leaving in mid-body": Attack(2, CHAT, 0.0),
    "leaving a little later": Attack(8, CHAT, 0.002),
    "reset when answered": Attack(2, "/version", None),
    "nested": Attack(2, CHAT, b'{"messages": ' + b"[" * 1_000_000),
}


_CHARS = """
from fastdeploy_core.engine import input
input.RequestLimits.max_chars = property(lambda limits: 10**9)
"""
_PARTS = """
from fastdeploy_core.serving.http import json_body
json_body.MAX_KEYS = json_body.MAX_VALUES = json_body.MAX_DEPTH = 10**9
"""
_STEPS = """
import fastdeploy_core.engine.step_time as module
module.SHARE = module.LEAST_S = module.ALONE_S = 1e9
"""
_MASKS = """
from fd_grammar_llguidance import backend, matcher
matcher.BUDGET_S, matcher.TRUSTED_AFTER = 1e9, 0
backend.LLParserLimits = lambda limits=backend.LLParserLimits, **_: limits()
"""
_LEAVING = """
from fastdeploy_core.serving.http import errors, protocol
errors.ClientDisconnect, protocol.has_left = SystemError, lambda connection: False
"""
_RESETS = """
from fastdeploy_core.serving.http.protocol import GuardedProtocol as Protocol
def connection_lost(connection, error, lost=Protocol.connection_lost):
    connection.timeout_keep_alive_task = None  # and it goes on
    lost(connection, error)
Protocol.connection_lost = connection_lost
"""
# What takes the bound on an attack away, run by every process of the server when it starts.
DEFENCES: dict[str, str] = {
    "text, to tokenize": _CHARS,
    "text, to be cut": _CHARS,
    "long prompts": _STEPS,
    "ambiguous grammar": _MASKS,
    "slow masks": _MASKS,
    "bad words": "from fastdeploy_core.types import sampling; sampling.MAX_BAD_WORD_CHARS = 10**9",
    "keys": _PARTS,
    "biases": _PARTS
    + "from fastdeploy_core.types import sampling; sampling.MAX_LOGIT_BIAS = 10**9",
    "looping templates": (
        "from fd_agent_apis.request_templates import render_in_child as r\n"
        'r.__kwdefaults__["wall_limit_s"] = 30.0'
    ),
    "leaving in mid-body": _LEAVING,
    "leaving a little later": _LEAVING,
    "reset when answered": _RESETS,
    "nested": _PARTS,
}


class Seen(NamedTuple):
    """What the normal client saw, and memory in bytes beyond that before the attack."""

    seconds: list[float]
    num_failed: int
    answers: Counter[str]
    peak: int
    kept: int


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--tensor-library", default="", choices=["", "torch", "paddle"])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--pause", type=float, default=0.05, help="of the client between requests")
    parser.add_argument("--without-defence", action="store_true", help="see above")
    parser.add_argument("--only", default="", help="attacks by a part of their name, with commas")
    add_json_option(parser)
    own, _, serve = " ".join(["", *sys.argv[1:]]).partition(" -- ")
    options = parser.parse_args(own.split())
    options.serve = serve.split() or ["--trust-request-chat-template"]
    return options


def memory_by_process(pid: int, name: str = "server") -> Counter[str]:
    """Bytes of a process and all below it, by what each is, what they share counted once (Linux);
    without files: what others map, too, changes with them. "server" is the process that was
    started."""
    found = Counter[str]()
    with suppress(OSError):  # it has just ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                found[name] += 1024 * int(line.split()[1])
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in listed.read_text().split():
                line = Path(f"/proc/{child}/cmdline").read_text()
                kind = next((k for k in ("engine", "api", "rank") if f"fastdeploy-{k}" in line), "")
                found += memory_by_process(int(child), kind or "helpers")
    return found


def memory_bytes(pid: int) -> int:
    """Memory of a process and all below it."""
    return memory_by_process(pid).total()


def ask(url: str, until: float, pause_s: float) -> tuple[list[float], int]:
    """The normal client: seconds of each short answer, and how many there were none of."""
    body = {"messages": HI, "max_tokens": 4, "temperature": 0}
    taken, num_failed = [], 0
    with httpx.Client(base_url=url, timeout=120) as client:
        while time.time() < until:
            began = time.perf_counter()
            try:
                num_failed += client.post(CHAT, json=body).status_code != 200
            except httpx.HTTPError:
                num_failed += 1
            taken.append(time.perf_counter() - began)
            time.sleep(pause_s)
    return taken, num_failed


def leave(url: str, after_s: float = 0.0) -> str:
    """Begin to send a body, then close the connection."""
    port = int(url.rpartition(":")[2])
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f'{head}Content-Length: 100\r\n\r\n{{"messages": '.encode())
        time.sleep(after_s)
    return "left"


def reset(url: str, path: str) -> str:
    """Be answered, then end the connection by a reset."""
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = connection.recv(65536)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return f"{answer[9:12].decode()}, reset"


def send(url: str, name: str, until: float) -> Counter[str]:
    """One attacker; what it was answered."""
    attack, answers = ATTACKS[name], Counter[str]()
    data = attack.body if isinstance(attack.body, bytes) else json.dumps(attack.body).encode()
    with httpx.Client(base_url=url, timeout=120) as client:

        def call() -> str:
            if isinstance(attack.body, float):
                return leave(url, attack.body)
            if attack.body is None:
                return reset(url, attack.path)
            headers = {"Content-Type": "application/json"}
            body = data.replace(NUMBER.encode(), str(random.getrandbits(53)).encode())
            return str(client.post(attack.path, content=body, headers=headers).status_code)

        while time.time() < until:
            try:
                answers[call()] += 1
            except (OSError, httpx.HTTPError) as error:
                answers[type(error).__name__] += 1
    return answers


@contextmanager
def running(options: argparse.Namespace, patch: str = "") -> Iterator[Start]:
    """A server that has answered once; its processes run `patch` first."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("PYTHONPATH", "")
        if patch:
            (Path(folder) / "sitecustomize.py").write_text(patch)
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(ROOT), before]).strip(":")
        server = Start(options)
        os.environ["PYTHONPATH"] = before
        try:
            server.wait_ready()
            server.first_token()
            yield server
        finally:
            server.stop()


def watch(
    server: Start, pool: ProcessPoolExecutor, options: argparse.Namespace, name: str, seconds: float
) -> Seen:
    """The normal client beside an attack, or alone if it has no name."""
    pid, until = server.process.pid, time.time() + seconds
    before = peak = memory_bytes(pid)
    client = pool.submit(ask, server.url, until, options.pause)
    senders = ATTACKS[name].senders if name else 0
    attackers = [pool.submit(send, server.url, name, until) for _ in range(senders)]
    while not all(job.done() for job in (client, *attackers)):
        peak = max(peak, memory_bytes(pid))
        time.sleep(0.1)
    answers = sum((job.result() for job in attackers), Counter[str]())
    time.sleep(SETTLE_S)
    return Seen(*client.result(), answers, peak - before, memory_bytes(pid) - before)


def p99(seconds: list[float]) -> float:
    """The 99th percentile, from above."""
    return sorted(seconds)[min(len(seconds) - 1, len(seconds) * 99 // 100)]


def main() -> None:
    """Run and print."""
    options = parse_arguments()
    wanted = [part for part in options.only.split(",") if part]
    names = [n for n in ATTACKS if not wanted or any(part in n for part in wanted)]
    print(
        f"{options.model} {' '.join(options.serve)}: {options.seconds:g} s each, {os.cpu_count()} "
        f"cores shared by server, client and attackers, load before {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}",
        flush=True,
    )
    columns = ("p50, ms", "p99, ms", "x quiet", "failed", "peak, MB", "kept, MB")
    print(f"{'':30}" + "".join(f"{column:>10}" for column in columns) + "  answers")
    spawn = multiprocessing.get_context("spawn")
    most = 1 + max(attack.senders for attack in ATTACKS.values())
    figures: dict[str, list[float]] = {}
    with running(options) as server, ProcessPoolExecutor(most, spawn) as pool:
        list(pool.map(time.sleep, [1.0] * most))  # until all of them are there
        for name in ("", *names):
            watch(server, pool, options, name, 2.0)
        quiet = watch(server, pool, options, "", options.seconds)
        for name in ("", *names):
            seen = watch(server, pool, options, name, options.seconds) if name else quiet
            show(name or "quiet", seen, quiet, figures)
    with ProcessPoolExecutor(most, spawn) as pool:
        list(pool.map(time.sleep, [1.0] * most))
        for name in [n for n in names if options.without_defence and n in DEFENCES]:
            with running(options, DEFENCES[name]) as server:
                watch(server, pool, options, "", 2.0)
                seen = watch(server, pool, options, name, options.seconds)
            show(f"{name}, no defence", seen, quiet, figures)
    print_figures(options, figures)


def show(name: str, seen: Seen, quiet: Seen, figures: dict[str, list[float]]) -> None:
    """A row of the table."""
    factor = p99(seen.seconds) / p99(quiet.seconds)
    cells = (
        f"{1000 * statistics.median(seen.seconds):.1f}",
        f"{1000 * p99(seen.seconds):.1f}",
        f"{factor:.1f}",
        str(seen.num_failed),
        f"{seen.peak / 1e6:.1f}",
        f"{seen.kept / 1e6:.1f}",
    )
    counts = ", ".join(f"{count} x {answer}" for answer, count in seen.answers.items())
    row = "".join(f"{cell:>10}" for cell in cells)
    print(f"{name:30}{row}  {counts}", flush=True)
    figures[f"{name}: p99, ms"] = [1000 * p99(seen.seconds)]
    figures[f"{name}: kept, MB"] = [seen.kept / 1e6]


if __name__ == "__main__":
    main()
