"""Real servers on the demo model, and routers in front of them."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
from server_process import REPOSITORY, CommandProcess, ServerProcess
from server_support import wait_for

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]

MODEL = REPOSITORY / "models" / "ernie-tiny"
ADMIN = {"Authorization": "Bearer admin"}


class Router(CommandProcess):
    """A running `fastdeploy router` with probes in quick succession."""

    def __init__(
        self, instances: list[str], *options: str, extra: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            *("router", "--instances", ",".join(instances), "--port", "0", "--admin-key", "admin"),
            *("--probe-interval", "0.1", "--probe-timeout", "0.5", *options),
            extra=extra,
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


def serve(*options: str) -> ServerProcess:
    """A server on the demo model."""
    return ServerProcess(MODEL, "--max-num-seqs", "16", *options)


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
def stopped() -> Iterator[Callable[[CommandProcess], None]]:
    """stopped(process) freezes a process until the test ends."""
    frozen: list[CommandProcess] = []

    def freeze(process: CommandProcess) -> None:
        process.signal(signal.SIGSTOP)
        frozen.append(process)

    yield freeze
    for process in frozen:
        process.signal(signal.SIGCONT)  # without effect on one that is dead
