"""The front door: probes are answered at once, everything else goes untouched to one API server."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from fastdeploy_core.serving.front.door import FrontDoor
from fastdeploy_core.serving.front.occupancy import Occupancy, OwnOccupancy
from fastdeploy_core.serving.http.listening import bind_socket
from fastdeploy_core.types.engine import EngineHealth
from tests.server_support import server_config, wait_for


class Door:
    """A front door with API servers that only keep what they get."""

    def __init__(self, count: int = 1, **config: object) -> None:
        self.health = EngineHealth(alive=True, ready=True)
        settings = server_config(**config)
        self.listener = bind_socket(replace(settings, ssl_certfile=None))  # no test reads a file
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.table = Occupancy(count)
        self.rows = [OwnOccupancy(self.table, number) for number in range(count)]
        self.got: list[list[socket.socket]] = [[] for _ in range(count)]
        self.door = FrontDoor(self.listener, settings, lambda: self.health, self.table)
        for number in range(count):
            self.door.add(number, self.got[number].append)
        self.door.start()

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(data)
        return connection

    def handed(self, count: int) -> None:
        wait_for(lambda: sum(map(len, self.got)) == count, f"{count} connections")


@contextmanager
def door_of(count: int = 1, **config: object) -> Iterator[Door]:
    door = Door(count, **config)
    try:
        yield door
    finally:
        door.door.close()
        door.door.close()
        door.listener.close()
        for got in door.got:
            for connection in got:
                connection.close()


def test_probes_are_answered_from_the_engines_health() -> None:
    with door_of() as door:
        for path, word in (
            ("/health", "healthy"),
            ("/ping", "healthy"),
            ("/health/ready", "ready"),
            ("/health/live", "live"),
        ):
            answer = httpx.get(door.url + path, headers={"x-request-id": "probe-1"})
            assert (answer.status_code, answer.json()) == (200, {"status": word})
            assert answer.headers["x-request-id"] == "probe-1"
        head = httpx.head(door.url + "/health")
        assert head.status_code == 200 and head.content == b""
        assert head.headers["content-length"] == "20" and len(head.headers["x-request-id"]) == 32
        door.health = EngineHealth(alive=False, ready=False, reason="restarting")
        for path in ("/health", "/health/ready"):
            answer = httpx.get(door.url + path)
            assert answer.status_code == 503 and answer.json()["reason"] == "restarting"
        assert httpx.get(door.url + "/health/live").status_code == 200
        door.health = EngineHealth(alive=True, ready=True)
        door.table.drain()
        assert httpx.get(door.url + "/health/ready").json() == {"status": "draining"}
        assert httpx.get(door.url + "/health").status_code == 200
        assert door.got == [[]]


@pytest.mark.parametrize(
    "data",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        b"GET /health?x=1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n",  # not complete
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x",
        b"GET /health HTTP/9\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # no Host: the API server refuses it
        b"\x16\x03\x01\x02\x00",
        b"G",
    ],
)
def test_everything_else_is_handed_over_unread(data: bytes) -> None:
    with door_of() as door, door.connect(data):
        door.handed(1)
        taken = door.got[0][0]
        taken.settimeout(60)
        assert taken.recv(65536) == data


@pytest.mark.parametrize(
    ("config", "answered"),
    [
        ({"api_keys": ("k",)}, {"/health/live", "/health/ready", "/health", "/ping"}),
        ({"allowed_hosts": ("example.org",)}, set()),
        ({}, {"/health/live", "/health/ready", "/health", "/ping"}),
    ],
)
def test_what_needs_a_host_check_is_not_answered_here(
    config: dict[str, object], answered: set[str]
) -> None:
    paths = ["/health/live", "/health/ready", "/health", "/ping"]
    with door_of(**config) as door:
        found = set()
        for path in paths:
            before = len(door.got[0])
            with door.connect(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode()) as connection:
                while not select.select([connection], [], [], 0.01)[0]:
                    if len(door.got[0]) > before:
                        break
                else:
                    found |= {path}
        assert found == answered


def test_connections_go_to_the_server_that_has_the_fewest() -> None:
    with door_of(3) as door:
        held = [door.connect(b"POST /") for _ in range(6)]
        door.handed(6)
        assert [len(got) for got in door.got] == [2, 2, 2]
        for row, count in ((1, 2), (2, 1)):
            for _ in range(count):
                door.rows[row].closed()
        held += [door.connect(b"POST /") for _ in range(3)]
        door.handed(9)
        assert [len(got) for got in door.got] == [2, 4, 3]
        for connection in held:
            connection.close()


def test_a_server_that_takes_nothing_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdeploy_core.serving.front.door.SWEEP_S", 0.05)

    def broken(connection: socket.socket) -> None:
        raise BrokenPipeError("gone")

    with door_of(2) as door:
        door.door.add(0, broken)
        with door.connect(b"POST /"), door.connect(b"POST /"):
            door.handed(2)
            assert len(door.got[1]) == 2
            door.door.remove(1)
            with door.connect(b"POST /"):  # it waits until somebody is there
                time.sleep(0.2)
                assert len(door.got[1]) == 2
                door.door.add(1, door.got[1].append)
                door.handed(3)


def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdeploy_core.serving.front.door.SWEEP_S", 0.05)
    monkeypatch.setattr("fastdeploy_core.serving.front.door.HEAD_TIMEOUT_S", 0.2)
    with door_of() as door, door.connect() as silent, door.connect() as gone:
        gone.close()
        silent.settimeout(60)
        assert silent.recv(1) == b""
        assert door.got == [[]]


def test_who_has_spoken_is_not_dropped_by_a_door_that_was_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastdeploy_core.serving.front.door.SWEEP_S", 0.05)
    is_stuck, has_spoken = threading.Event(), threading.Event()

    def stuck(_: socket.socket) -> None:
        door.door.remove(1)
        door.door.add(0, door.got[0].append)
        is_stuck.set()
        has_spoken.wait(60)
        monkeypatch.setattr("fastdeploy_core.serving.front.door.HEAD_TIMEOUT_S", 0.05)
        time.sleep(0.1)  # now it is late
        raise OSError("gone")

    with door_of(2) as door, door.connect() as late:
        door.door.remove(0)
        door.door.add(1, stuck)
        with door.connect(b"POST /"):
            assert is_stuck.wait(60)
            late.sendall(b"POST /")
            has_spoken.set()
            door.handed(2)


def test_encrypted_connections_are_handed_over_at_once() -> None:
    with door_of(ssl_certfile="cert", ssl_keyfile="key") as door, door.connect():
        door.handed(1)


def test_a_probe_is_answered_beside_a_thread_that_is_always_busy() -> None:
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            sum(range(100_000))

    with door_of() as door:
        thread = threading.Thread(target=busy)
        thread.start()
        try:
            for _ in range(5):
                assert httpx.get(door.url + "/health").status_code == 200
        finally:
            stop.set()
            thread.join()


def test_shared_numbers_are_seen_by_all(tmp_path) -> None:
    first = Occupancy(2, tmp_path / "table", create=True)
    second = Occupancy(2, tmp_path / "table")
    rows = [OwnOccupancy(first, 0), OwnOccupancy(second, 1)]
    rows[0].change(3)
    rows[1].change(2)
    rows[1].closed()
    assert first.in_flight() == second.in_flight() == 5
    assert first.num_closed(1) == 1 and second.num_closed(0) == 0
    OwnOccupancy(second, 0)  # a restarted one begins anew
    assert first.in_flight() == 2
