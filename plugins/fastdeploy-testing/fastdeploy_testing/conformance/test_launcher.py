"""Launchers: what is started runs where it says, a death is told, nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from fastdeploy_core.contracts.small import InstanceSpec, Launcher
from fastdeploy_core.errors import ConfigError

from .base import Conformance, wait_until

# A server that says its process id, and takes a moment to end on SIGTERM.
SERVER = """
import http.server, os, signal, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *_): pass
def end(*_):
    if sys.argv[3] == "deaf": return
    time.sleep(0.3)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
http.server.HTTPServer.allow_reuse_address = True
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
Make = Callable[[], Launcher]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def spec(name: str, how: str = "polite") -> InstanceSpec:
    """A server that a launcher can start on any host with this Python."""
    return InstanceSpec(name, ("-c", SERVER, "{host}", "{port}", how), free_port())


def process_at(address: str) -> int:
    """The process that answers there; 0: none."""
    try:
        with urllib.request.urlopen(f"http://{address}/", timeout=5) as answer:
            return int(answer.read())
    except OSError:
        return 0


class LauncherConformance(Conformance):
    """All servers run on this host, where signals reach them. Override `options` where the launcher
    needs any."""

    kind = "launcher"
    options: ClassVar[dict[str, str]] = {}

    @pytest.fixture
    def make(self, driver: Any, fd_options: dict[str, str]) -> Iterator[Make]:
        """Makes launchers that are stopped in the end."""
        made: list[Launcher] = []

        def build() -> Launcher:
            made.append(driver({**self.options, **fd_options}))
            return made[-1]

        yield build
        for one in made:
            one.stop(0)

    def test_servers_listen_where_the_launcher_says(self, make: Make) -> None:
        launcher = make()
        assert launcher.is_head is True, "one process alone runs the router"
        addresses = launcher.start([spec("a"), spec("b")])
        assert len(set(addresses)) == 2
        assert wait_until(lambda: all(map(process_at, addresses)), 60), "a server does not answer"
        assert launcher.exit_code("a") is launcher.exit_code("b") is None
        launcher.stop(10)
        assert not any(map(process_at, addresses)), "stop() leaves servers behind"
        launcher.stop(10)

    def test_a_death_is_told_and_only_that_server_starts_again(self, make: Make) -> None:
        launcher = make()
        addresses = launcher.start([spec("a"), spec("b")])
        assert wait_until(lambda: all(map(process_at, addresses)), 60)
        killed, other = map(process_at, addresses)
        os.kill(killed, signal.SIGKILL)
        assert wait_until(lambda: launcher.exit_code("a") is not None, 60), "no word of a death"
        assert launcher.exit_code("a") != 0
        assert launcher.exit_code("b") is None
        again = launcher.restart("a")
        assert wait_until(lambda: process_at(again) not in (0, killed), 60)
        assert launcher.exit_code("a") is None
        assert process_at(addresses[1]) == other

    def test_a_server_that_ignores_sigterm_is_killed(self, make: Make) -> None:
        launcher = make()
        (address,) = launcher.start([spec("a", "deaf")])
        assert wait_until(lambda: process_at(address), 60)
        launcher.stop(0.5)
        assert not process_at(address)

    def test_an_option_that_it_does_not_know_is_refused(
        self, driver: Any, fd_options: dict[str, str]
    ) -> None:
        with pytest.raises(ConfigError, match="no_such_option"):
            driver({**self.options, **fd_options, "no_such_option": "1"})

    def test_stop_before_start_does_nothing(self, make: Make) -> None:
        make().stop(0)


class TestLauncher(LauncherConformance):
    """Run by `fastdeploy plugins check`."""
