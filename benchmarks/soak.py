r"""Requests of every kind and fuzzed ones over all routes, for long: errors, stalls, growth.

    python benchmarks/soak.py models/ernie-tiny --tensor-library torch --requests 20000
    python benchmarks/soak.py MODEL --minutes 60 -- --max-num-seqs 8
    python benchmarks/soak.py MODEL --leaving 1  # memory after 20,000 that left in mid-body
    python benchmarks/soak.py MODEL --minutes 60 --attacks leaving,reset,keys

Starts one server and reads its routes from /openapi.json. `--clients` processes send requests: a
part is answered (`--normal`), the rest has one to three fields replaced by values that do not fit,
bodies that are no JSON, paths and methods that are not there, and clients that leave. With
--attacks, those of under_attack.py whose name holds one of these words go on beside them. Another
process asks /health every 20 ms. Prints how many requests had which status, which ones had 5xx, the
longest answer of /health, and by how many bytes a request each of the server's processes grew after
`--warm-up` of them: the median slope between any two of the times when it was measured. Memory goes
up and down by what allocators keep; how far is printed, too. Clients and server share the
processors. Arguments after -- go to the server. The same --seed sends the same requests. Ends with
1 when a request was answered 5xx or not at all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from typing import Any, NamedTuple

import httpx
from figures import add_json_option, print_figures
from start_up import Start
from under_attack import ATTACKS, leave, memory_by_process
from under_attack import send as send_attacks

HEALTH_S = 0.02
SETTLE_S = 3.0
HI = [{"role": "user", "content": "hi"}]
USUAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 4},
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/tokenize": {"prompt": "some text"},
    "/detokenize": {"tokens": [5, 6]},
}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"stream": True},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "top_k": 7},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 2, "temperature": 0.9},
    {"stop": ["a", "the"]},
    {"logit_bias": {"5": 1}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"presence_penalty": 0.5, "repetition_penalty": 1.1, "bad_words": ["x"]},
)
JUNK: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        17,
        2**31,
        2**63 - 1,
        -(2**63),
        2**70,
        0.5,
        -1.5,
        1e308,
        "",
        "a",
    ),
    *("\x00", "\ud800", "é" * 50, "x" * 3000, "x" * 200_000, [], {}, [0], [-1], [2**62], ["a"]),
    *([None], [[]], [{}], [[1], ["a"]], {"a": 1}, {"type": "function"}, {"type": "json_schema"}),
    *({"regex": "(a+)+$"}, {"regex": "["}, {"choice": []}, {"grammar": "start: start"}),
    *(
        {"json": {"$ref": "#"}},
        {"1": 5.0},
        {"-1": 1},
        {"include_usage": 3},
        [HI],
        list(range(2000)),
    ),
    *([{"role": "tool", "content": 3}], [{"role": "user", "content": [{"type": "image_url"}]}]),
)
RAW = (
    b"",
    b"[",
    b"nonsense",
    b"\xff\xfe",
    b'{"a": NaN}',
    b'{"a": 1, "a": 2}',
    b"[" * 5000,
    b"null",
)


class Sent(NamedTuple):
    """What one client saw."""

    statuses: Counter[str]
    failures: list[str]  # requests that were answered 5xx, or not at all
    attacks: Counter[str]  # what attackers were answered


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--tensor-library", default="", choices=["", "torch", "paddle"])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=0.0, help="instead of --requests")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--normal", type=float, default=0.3, help="share of requests that fit")
    parser.add_argument("--leaving", type=float, default=0.0, help="share that leaves in mid-body")
    parser.add_argument("--warm-up", type=float, default=0.4, help="share of requests")
    parser.add_argument("--measures", type=int, default=6, help="of memory after that")
    parser.add_argument("--attacks", default="", help="of under_attack.py, by parts of their names")
    parser.add_argument("--seed", type=int, default=1)
    add_json_option(parser)
    own, _, serve = " ".join(["", *sys.argv[1:]]).partition(" -- ")
    options = parser.parse_args(own.split())
    options.serve = serve.split()
    wanted = [part for part in options.attacks.split(",") if part]
    options.attackers = [
        name
        for name, attack in ATTACKS.items()
        for _ in range(attack.senders)
        if any(part in name for part in wanted)
    ]
    if options.attackers and not options.minutes:
        parser.error("--attacks go on for --minutes, which are not given")
    return options


class Routes:
    """The server's routes, and the fields of their bodies."""

    def __init__(self, url: str) -> None:
        described = httpx.get(f"{url}/openapi.json", timeout=60).json()
        schemas = described.get("components", {}).get("schemas", {})
        self.all: list[tuple[str, str]] = []
        self.fields: dict[str, list[str]] = {}
        for path, methods in described["paths"].items():
            for method, route in methods.items():
                self.all.append((method.upper(), path))
                content = route.get("requestBody", {}).get("content", {})
                schema = content.get("application/json", {}).get("schema", {})
                name = schema.get("$ref", "").rpartition("/")[2]
                names = {**schema, **schemas.get(name, {})}.get("properties", {})
                self.fields[path] = sorted(names) or ["model", "messages", "prompt", "input"]


def make_request(draw: random.Random, routes: Routes, normal: float) -> tuple[str, str, bytes]:
    """Method, path and body."""
    if draw.random() < normal:
        path = draw.choice(list(USUAL))
        body = dict(USUAL[path])
        if path.startswith("/v1/"):
            body |= draw.choice(KINDS)
        if path == "/v1/completions":
            body.pop("response_format", None)
            body["logprobs"] = body.pop("top_logprobs", None)
        return "POST", path, json.dumps(body).encode()
    method, path = draw.choice(routes.all)
    kind = draw.random()
    if kind < 0.05:
        return draw.choice(["GET", "PUT", "DELETE", "PATCH"]), path, b""
    if kind < 0.1:
        return method, path + draw.choice(["/", "/x", "%00", "?a=b", "/..%2f"]), b"{}"
    if kind < 0.2:
        return method, path, draw.choice(RAW)
    # without a limit a text that says nothing is answered up to the end of the context
    usual = {"messages": HI, "input": "hi", "max_tokens": 4, "max_output_tokens": 4}
    body = dict(USUAL.get(path, usual))
    for _ in range(draw.randrange(1, 4)):
        body[draw.choice(routes.fields[path])] = draw.choice(JUNK)
    return method, path, json.dumps(body).encode()


def send(
    url: str, seed: int, count: int, until: float, normal: float, leaving: float = 0.0
) -> Sent:
    """One client."""
    draw, routes, seen = random.Random(seed), Routes(url), Sent(Counter(), [], Counter())
    with httpx.Client(base_url=url, timeout=120) as client:
        for _ in range(count):
            if time.time() > until:
                break
            if draw.random() < leaving:
                seen.statuses["left in mid-body"] += 1
                leave(url)
                # The server keeps up: what thousands of open connections take at once stays with
                # the process, and is no growth.
                if seen.statuses["left in mid-body"] % 20 == 0:
                    client.get("/version").raise_for_status()
                continue
            method, path, body = make_request(draw, routes, normal)
            headers, text = {"Content-Type": "application/json"}, ""
            try:
                if draw.random() < 0.03:  # it leaves
                    with client.stream(method, path, content=body, headers=headers) as answer:
                        status = f"left at {answer.status_code}"
                else:
                    answer = client.request(method, path, content=body, headers=headers)
                    status, text = str(answer.status_code), answer.text[:200]
            except httpx.HTTPError as error:
                status = type(error).__name__
            seen.statuses[status] += 1
            # 501: a route or a field that this server does not serve, in words
            is_error = status.startswith("5") and status != "501"
            if is_error or status.endswith(("Error", "Timeout")):
                seen.failures.append(f"{status} {method} {path} {body[:300]!r}: {text}")
    return seen


class Health(threading.Thread):
    """Asks /health all the time; `longest` is the longest answer in seconds."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.ended = threading.Event()
        self.longest = 0.0

    def run(self) -> None:
        """Until it is told to end."""
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self.ended.wait(HEALTH_S):
                began = time.perf_counter()
                client.get("/health").raise_for_status()
                self.longest = max(self.longest, time.perf_counter() - began)


def phase(
    server: Start, pool: ProcessPoolExecutor, options: argparse.Namespace, share: float, seed: int
) -> tuple[Sent, Counter[str]]:
    """A part of all requests; what was seen, and the memory of the server's processes then."""
    count = round(options.requests * share / options.clients)
    until = time.time() + 60 * options.minutes * share if options.minutes else float("inf")
    count = sys.maxsize if options.minutes else count
    jobs = [
        pool.submit(send, server.url, seed + number, count, until, options.normal, options.leaving)
        for number in range(options.clients)
    ]
    attacks = [pool.submit(send_attacks, server.url, name, until) for name in options.attackers]
    seen = Sent(Counter(), [], sum((job.result() for job in attacks), Counter()))
    for job in jobs:
        seen.statuses.update(job.result().statuses)
        seen.failures.extend(job.result().failures)
    time.sleep(SETTLE_S)
    return seen, memory_by_process(server.process.pid)


def growth_of(points: Sequence[tuple[int, Counter[str]]]) -> dict[str, float]:
    """Bytes a request of each process, and of all: medians of slopes between any two points."""
    series = {name: [memory[name] for _, memory in points] for name in points[-1][1]}
    series["all"] = [memory.total() for _, memory in points]
    counts = [count for count, _ in points]
    pairs = list(combinations(range(len(points)), 2))
    return {
        name: statistics.median((of[b] - of[a]) / max(1, counts[b] - counts[a]) for a, b in pairs)
        for name, of in series.items()
    }


def main() -> int:
    """Run and print."""
    options = parse_arguments()
    statuses, attacks, failures = Counter[str](), Counter[str](), list[str]()
    points: list[tuple[int, Counter[str]]] = []  # requests so far, bytes of each process
    server = Start(options)
    try:
        server.wait_ready()
        server.first_token()
        health = Health(server.url)
        health.start()
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.clients + len(options.attackers), spawn) as pool:
            shares = [options.warm_up] + [
                (1 - options.warm_up) / options.measures
            ] * options.measures
            for number, share in enumerate(shares):
                seed = (options.seed << 24) + (number << 12)
                now, memory = phase(server, pool, options, share, seed)
                statuses.update(now.statuses)
                failures.extend(now.failures)
                attacks.update(now.attacks)
                points.append((statuses.total(), memory))
        health.ended.set()
        health.join()
    finally:
        server.stop()
    growths = growth_of(points)
    growth = growths.pop("all")
    totals = [memory.total() / 1e6 for _, memory in points]
    print(
        f"{options.model} {' '.join(options.serve)}: {statuses.total()} requests, "
        f"{options.clients} clients, seed {options.seed}, {os.cpu_count()} cores shared with them, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}"
    )
    print(", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())))
    if attacks:
        shown = ", ".join(f"{count} x {status}" for status, count in sorted(attacks.items()))
        print(f"beside attacks, which were answered {shown}")
    print(f"longest answer of /health {1000 * health.longest:.0f} ms")
    parts = ", ".join(f"{name} {each / 1000:.3f}" for name, each in growths.items())
    print(f"growth {growth / 1000:.3f} KB a request after the first {points[0][0]}: {parts}")
    print(f"memory then {' '.join(f'{each:.1f}' for each in totals)} MB")
    print("\n".join([f"{len(failures)} answered 5xx or not at all", *failures[:20]]))
    figures = {"health, ms": [1000 * health.longest], "growth, KB": [growth / 1000]}
    print_figures(options, figures)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
