"""Seconds from the command to a server that answers, and to its first token; where they go.

    python benchmarks/start_up.py models/ernie-tiny --tensor-library torch
    python benchmarks/start_up.py MODEL --rounds 3 -- --load-format dummy

Runs `fastdeploy serve` several times. Prints the median second of each step of the start, and the
log of the last round with times. Byte code is kept, as after installing packages. Arguments after
-- go to `fastdeploy serve`. With --idle SECONDS each round also leaves the server idle for that
long and prints the processor time that it took meanwhile (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from figures import add_json_option, print_figures

LIMIT_S = 600.0
POLL_S = 0.01
SETTLE_S = 5.0  # after the last answer, before a server counts as idle
# Steps of the start in their order, each with the log line that ends it.
STEPS = {
    "serving: fastdeploy ": "arguments and model folder read, engine process started",
    "plugins: scheduler ": "plugins chosen",
    "engine/plugins: device ": "engine has the tensor library and the plugins' kernels",
    "engine/worker: rank 0: ": "weights loaded, largest step measured",
    "serving: engine ready ": "KV cache made, steps recorded; the app is ready, too",
}


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensor-library", default="", choices=["", "torch", "paddle"])
    parser.add_argument("--idle", type=float, default=0.0, help="seconds without requests")
    parser.add_argument("--quiet", action="store_true", help="no log lines")
    parser.add_argument("--show-each", action="store_true", help="log lines of every round")
    add_json_option(parser)
    own, _, serve = " ".join(["", *sys.argv[1:]]).partition(" -- ")
    options = parser.parse_args(own.split())
    options.serve = serve.split()
    return options


class Start:
    """One start of a server, its milestones in seconds since the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "fastdeploy_core.cli.main", "serve", options.model]
        command += ["--host", "127.0.0.1", "--port", str(port), *options.serve]
        if options.tensor_library:
            command += ["--tensor-library", options.tensor_library]
        self.lines: list[tuple[float, str]] = []
        self.began = time.perf_counter()
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self._results = threading.Thread(target=self._read, daemon=True)
        self._results.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.perf_counter() - self.began, line.rstrip()))

    def wait_ready(self) -> float:
        """Seconds until /health/ready answers 200."""
        while time.perf_counter() - self.began < LIMIT_S:
            try:
                with urllib.request.urlopen(f"{self.url}/health/ready", timeout=5) as answer:
                    if answer.status == 200:
                        return time.perf_counter() - self.began
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(POLL_S)
        self.show()
        raise SystemExit("the server did not start")

    def first_token(self) -> float:
        """Seconds until a first token has come."""
        body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 1, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        return time.perf_counter() - self.began

    def idle(self, seconds: float) -> float:
        """Seconds of processor time of all its processes while it is idle for that long."""
        time.sleep(SETTLE_S)
        before = processor_s(self.process.pid)
        time.sleep(seconds)
        return processor_s(self.process.pid) - before

    def stop(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._results.join(5)

    def steps(self) -> dict[str, float]:
        """When each of STEPS was done."""
        found: dict[str, float] = {}
        for seconds, line in self.lines:
            for said, step in STEPS.items():
                if said in line:
                    found.setdefault(step, seconds)
        return found

    def show(self) -> None:
        """Print its log with times."""
        for seconds, line in self.lines:
            print(f"  {seconds:7.2f}  {line[:200]}")


def family(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listed.read_text().split():
            yield from family(int(child))


def processor_s(pid: int) -> float:
    """Seconds of processor time of a process and all its descendants."""
    fields = (Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split() for p in family(pid))
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run and print."""
    options = parse_arguments()
    rounds: list[dict[str, float]] = []
    steps: dict[str, list[float]] = {}
    for number in range(options.rounds):
        cpu = os.times()
        start = Start(options)
        result = {"ready_s": start.wait_ready(), "first_token_s": start.first_token()}
        idle_s = start.idle(options.idle) if options.idle else 0.0
        start.stop()
        for step, seconds in start.steps().items():
            steps.setdefault(step, []).append(seconds)
        after = os.times()
        result["processor_s"] = (
            after.children_user + after.children_system - cpu.children_user - cpu.children_system
        )
        rounds.append(result)
        shown = ", ".join(f"{name} {value:.2f}" for name, value in result.items())
        print(f"round {number + 1}: {shown}", flush=True)
        if options.idle:
            share = 100 * idle_s / options.idle
            print(f"  idle for {options.idle:g} s: {idle_s:.2f} s of processor time, {share:.2f} %")
            result["idle_s"] = idle_s
        if options.show_each or (number + 1 == options.rounds and not options.quiet):
            start.show()
    for step, times in steps.items():
        print(f"  {statistics.median(times):7.2f} s  {step}")
    median = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    print(
        f"{options.model} {' '.join(options.serve)}: ready after {median['ready_s']:.2f} s, first "
        f"token after {median['first_token_s']:.2f} s (medians of {len(rounds)}, first round "
        f"{rounds[0]['ready_s']:.2f} s), {median['processor_s']:.1f} s of processor time; "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )
    names = {
        "ready_s": "ready, s",
        "first_token_s": "first token, s",
        "processor_s": "processor time of all processes, s",
        "idle_s": "processor time while idle, s",
    }
    print_figures(options, {names[name]: [result[name] for result in rounds] for name in rounds[0]})


if __name__ == "__main__":
    main()
