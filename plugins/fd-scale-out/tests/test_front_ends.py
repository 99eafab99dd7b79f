"""Who of the API servers that say hello gets connections."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fd_scale_out.front_end import Hello
from fd_scale_out.front_ends import FrontEnds
from fd_scale_out.paths import door_path
from null_engine import make_config
from server_support import server_config, wait_for

from fastdeploy_core.serving.http.listening import bind_socket

SLEEPS = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def front_ends() -> Iterator[FrontEnds]:
    """Two processes that stand for API servers, and who attends to them; no engine is started."""
    config = server_config(api_server_count=2)
    listener = bind_socket(config)
    plugins: Any = SimpleNamespace(resolved=Future())
    made = FrontEnds(make_config(), config, plugins, listener)
    for number in range(2):
        made._processes[number] = subprocess.Popen(SLEEPS, stdin=subprocess.PIPE)
    threading.Thread(target=made._receive, daemon=True).start()
    yield made
    for process in made._processes.values():
        process.communicate()
    made._end()
    listener.close()


def say_hello(front_ends: FrontEnds, number: int, pid: int) -> socket.socket:
    """What an API server says from its start until it serves."""
    hall = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hall.settimeout(60)
    hall.connect(door_path(str(front_ends._folder)))
    for _ in range(2):
        hall.send(msgspec.msgpack.encode(Hello(number, pid)))
    return hall


def test_one_whose_successor_was_started_gets_no_connections(front_ends: FrontEnds) -> None:
    with subprocess.Popen(SLEEPS, stdin=subprocess.PIPE) as before:
        with say_hello(front_ends, 0, before.pid) as late:
            assert late.recv(1) == b"", "it was not turned away"
        before.communicate()
    assert front_ends._halls == {} and front_ends.door._servers == {}
    with say_hello(front_ends, 0, front_ends._processes[0].pid):
        wait_for(lambda: list(front_ends.door._servers) == [0], "its successor to serve")


def test_one_that_died_before_it_was_heard_gets_no_connections(front_ends: FrontEnds) -> None:
    dead = front_ends._processes[1]
    dead.communicate()
    with say_hello(front_ends, 1, dead.pid) as late:
        assert late.recv(1) == b"", "it was not turned away"
    assert front_ends._halls == {} and front_ends.door._servers == {}
