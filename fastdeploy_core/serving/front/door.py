"""The listening socket: answers health probes itself and gives every other connection to an API
server.

It runs in a thread of its own. So probes are answered however busy the API servers are, and each
connection goes to the API server that has the fewest. Bytes of a connection that is given away stay
unread. An encrypted connection cannot be inspected and is given away at once.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Callable
from http import HTTPStatus

import h11
import msgspec

from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.serving.http.middleware import OPEN_PATHS, shown_id
from fastdeploy_core.serving.http.protocol import HEAD_TIMEOUT_S, PEEK_BYTES
from fastdeploy_core.types.engine import EngineHealth

from .occupancy import Occupancy
from .probes import answer_probe

logger = logging.getLogger(__name__)

HandOver = Callable[[socket.socket], None]  # raises OSError when the API server is gone or full
MAX_ACCEPTS = 64  # per turn, so that other connections get theirs
SWEEP_S = 0.5


class FrontDoor:
    """The accepting thread. Other threads add and remove API servers."""

    def __init__(
        self,
        listener: socket.socket,
        config: ServerConfig,
        health: Callable[[], EngineHealth],
        occupancy: Occupancy,
    ) -> None:
        self._listener = listener
        self._health = health
        self._occupancy = occupancy
        self._is_encrypted = config.ssl_certfile is not None
        # Probes on these paths are answered here, because only the path decides about the answer.
        self._open_paths = frozenset() if config.allowed_hosts else OPEN_PATHS
        # number to (function, connections given to it so far)
        self._servers: dict[int, tuple[HandOver, int]] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        # connections without any bytes yet, and their deadlines
        self._waiting: dict[socket.socket, float] = {}
        self._wake, self._wake_end = socket.socketpair()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="fd-front-door", daemon=True)

    def add(self, number: int, hand_over: HandOver) -> None:
        """An API server takes connections from now on; its count of ended ones begins at 0."""
        with self._lock:
            self._servers[number] = (hand_over, 0)
        self._wake.send(b"+")

    def remove(self, number: int) -> None:
        """An API server takes no more connections. Without any API server, connections wait for the
        next one: it is being started."""
        with self._lock:
            self._servers.pop(number, None)

    def start(self) -> None:
        """Start to accept."""
        self._selector.register(self._wake_end, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()

    def close(self) -> None:
        """Accept no more; the listening socket stays the caller's. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._wake.send(b"x")
            if self._thread.is_alive():
                self._thread.join()
            for connection in self._waiting:
                connection.close()
            self._selector.close()
            self._wake.close()
            self._wake_end.close()

    def _run(self) -> None:
        swept_s = time.monotonic()
        while not self._is_closed:
            for key, _ in self._selector.select(SWEEP_S):
                if key.fileobj is self._wake_end:
                    self._wake_end.recv(64)
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._look(key.fileobj)
            now = time.monotonic()
            if now - swept_s > SWEEP_S:
                swept_s = now
                self._sweep(now)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptors left, or the client has gone already
                logger.warning("a connection could not be accepted: %s", error)
                time.sleep(0.01)
                return
            connection.setblocking(False)
            if self._is_encrypted:
                self._pass_on(connection)
            else:
                self._waiting[connection] = time.monotonic() + HEAD_TIMEOUT_S
                self._selector.register(connection, selectors.EVENT_READ)

    def _look(self, connection: socket.socket) -> None:
        """The first bytes arrived: answer a probe, or give the connection to an API server."""
        try:
            data = connection.recv(PEEK_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._forget(connection)
        if not data:
            connection.close()
            return
        answer = self._answer(data) if data.startswith((b"GET /", b"HEAD /")) else None
        if answer is None:
            self._pass_on(connection)
            return
        with contextlib.suppress(OSError):
            connection.recv(len(data))
            connection.send(answer)
            connection.shutdown(socket.SHUT_WR)
        connection.close()

    def _answer(self, data: bytes) -> bytes | None:
        """The complete answer to a probe; None for any request that differs, even slightly."""
        if not data.endswith(b"\r\n\r\n"):
            return None
        http = h11.Connection(h11.SERVER)
        try:
            http.receive_data(data)
            request = http.next_event()
            if not isinstance(request, h11.Request) or http.next_event() is h11.NEED_DATA:
                return None
        except h11.RemoteProtocolError:
            return None
        path = request.target.decode("ascii", "replace")
        if path not in self._open_paths:
            return None
        status, body = answer_probe(path, self._health(), self._occupancy)
        content = msgspec.json.encode(body)
        given = next((value for name, value in request.headers if name == b"x-request-id"), b"")
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n"
            f"x-request-id: {shown_id(given, uuid.uuid4().hex)}\r\n\r\n"
        )
        return head.encode("ascii") + (content if request.method == b"GET" else b"")

    def _pass_on(self, connection: socket.socket) -> None:
        """Give the connection to the API server with the fewest; while there is none, it waits."""
        with self._lock:
            servers = dict(self._servers)
        closed = self._occupancy.num_closed
        for number in sorted(servers, key=lambda n: servers[n][1] - closed(n)):
            hand_over, _ = servers[number]
            try:
                hand_over(connection)
            except OSError as error:
                logger.warning("API server %d takes no connection: %s", number, error)
                continue
            with self._lock:
                if number in self._servers:
                    self._servers[number] = (hand_over, self._servers[number][1] + 1)
            return
        self._waiting[connection] = time.monotonic() + HEAD_TIMEOUT_S

    def _sweep(self, now: float) -> None:
        """Close connections that stay silent; retry those for which there was no API server."""
        watched = {key.fileobj for key in self._selector.get_map().values()}
        for connection, until in list(self._waiting.items()):
            if now > until:
                self._look(connection)  # its bytes may have come while this thread stood still
                if connection in self._waiting:
                    self._forget(connection)
                    connection.close()
            elif connection not in watched:
                del self._waiting[connection]
                self._pass_on(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._waiting.pop(connection, None)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
