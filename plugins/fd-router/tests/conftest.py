"""Real servers on the demo model, and routers in front of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]

MODEL = Path(__file__).resolve().parents[3] / "models" / "ernie-tiny"
ADMIN = {"Authorization": "Bearer admin"}
_URL = re.compile(r"(?:serving .* at|routing at) (http://\S+)")


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 30) -> Any:
    """The first true value of a condition."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout_s} s for {what}")


class Process:
    """A command of `fastdeploy` that listens; its log is kept."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FD_")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fastdeploy_core.cli.main", *arguments],
            env={**kept, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        """Where it listens; waits until it does."""

        def found() -> re.Match[str] | None:
            match = _URL.search(self.log)
            assert match or self.process.poll() is None, self.log
            return match

        return wait_for(found, "the process to listen", 60)[1]

    @property
    def name(self) -> str:
        """As routers name it."""
        return self.url.removeprefix("http://")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """Ends it, if it lives; its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._reader.join(10)
        return self.process.wait()


class Router(Process):
    """A running `fastdeploy router` with probes in quick succession."""

    def __init__(self, instances: list[str], *options: str) -> None:
        super().__init__(
            *("router", "--instances", ",".join(instances), "--port", "0", "--admin-key", "admin"),
            *("--probe-interval", "0.1", "--probe-timeout", "0.5", *options),
        )

    def until_ready(self, count: int) -> Router:
        """Waits until so many instances can be used."""
        health = f"{self.url}/health"
        wait_for(lambda: httpx.get(health).json()["instances"] == count, f"{count} instances")
        return self

    def admin(self, name: str, action: str) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/admin/instances/{name}/{action}", headers=ADMIN)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def listed(self, field: str) -> dict[str, Any]:
        """What /admin says of each instance."""
        listed = httpx.get(f"{self.url}/admin/instances", headers=ADMIN).json()
        return {one["name"]: one[field] for one in listed}

    def in_flight(self) -> dict[str, int]:
        """Requests of each instance."""
        return self.listed("requests_in_flight")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        text = httpx.get(f"{self.url}/metrics").text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if re.match(rf"{name}[{{ ]", line) and all(label in line for label in wanted)
        )


def serve(port: int = 0) -> Process:
    """A server on the demo model."""
    return Process(
        *("serve", str(MODEL), "--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "16"),
    )


class Pair:
    """Two servers and a router in front of them."""

    def __init__(self) -> None:
        self.servers = [serve(), serve()]
        self.router = Router([server.url for server in self.servers]).until_ready(2)

    def stop(self) -> None:
        for process in (self.router, *self.servers):
            process.stop()


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Tests leave both servers alive and taking requests."""
    made = Pair()
    yield made
    made.stop()


@pytest.fixture
def route() -> Iterator[Callable[..., Router]]:
    """route(urls, *options) starts a router of the test's own."""
    started: list[Router] = []

    def start(instances: list[str], *options: str) -> Router:
        started.append(Router(instances, *options))
        return started[-1]

    yield start
    for router in started:
        router.stop()


@pytest.fixture
def stopped() -> Iterator[Callable[[Process], None]]:
    """stopped(process) freezes a process until the test ends."""
    frozen: list[Process] = []

    def freeze(process: Process) -> None:
        process.signal(signal.SIGSTOP)
        frozen.append(process)

    yield freeze
    for process in frozen:
        process.signal(signal.SIGCONT)  # without effect on one that is dead
