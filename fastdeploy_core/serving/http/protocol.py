"""HTTP/1.1 for uvicorn, parsed by httptools: bounds on request heads, a fast path for streamed
bodies, and notice of clients that leave.

httptools parses in C what uvicorn's other parser parses in Python, but it has no bounds and leaves
some checks to its caller: see `check_head`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import select
import socket
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "fastdeploy.connection"  # where a call's scope holds its Cycle
HEAD_TIMEOUT_S = 10.0
LAST_LOOK_S = 0.05
MAX_HEAD_BYTES = 64 * 1024
NO_MORE = getattr(select, "POLLRDHUP", 0)  # Linux
PEEK_BYTES = 4096
_AUTHORITY = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)
UNTIL_CLOSED = sys.maxsize  # the length of a body that ends when its connection closes


class Cycle(RequestResponseCycle):
    """One request and its answer, with what ASGI's `send` makes slow or impossible."""

    _on_left: Callable[[], None] | None = None

    def abort(self) -> None:
        """Close at once; unsent bytes are lost."""
        self.transport.abort()

    def write(self, data: bytes) -> bool:
        """Send a non-empty part of a body without declared length, after the head, to a client that
        knows chunks (HTTP/1.1). True: the client reads too slowly; wait for `drain`."""
        if self.disconnected:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return self.flow.write_paused

    async def drain(self) -> None:
        """Wait until the client has read enough for more."""
        await self.flow.drain()

    def watch(self, on_left: Callable[[], None] | None) -> None:
        """Call on_left once if the client leaves before its answer is complete; None: no more."""
        self._on_left = on_left
        self.flow.resume_reading()  # a paused reader would not notice that the client leaves
        if self.disconnected and on_left is not None:
            on_left()

    def leave(self) -> None:
        """The client has left."""
        self.disconnected = True
        self.message_event.set()
        if self._on_left is not None:
            self._on_left()

    async def send(self, message: Any) -> None:
        """ASGI's send, as in uvicorn, with one difference: HTTP/1.0 has no chunks, so a body
        without declared length ends with its connection."""
        if self.scope["http_version"] == "1.0":
            if message["type"] == "http.response.start":
                if not any(name == b"content-length" for name, _ in message["headers"]):
                    self.chunked_encoding, self.expected_content_length = False, UNTIL_CLOSED
            elif self.expected_content_length > UNTIL_CLOSED // 2 and not message.get("more_body"):
                self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def connection_of(scope: Scope) -> Cycle | None:
    """The Cycle of a call; None if the call came without a connection."""
    found: weakref.ref[Cycle] | None = scope.get("extensions", {}).get(EXTENSION)
    return None if found is None else found()


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # requests of this connection; the first one is being answered
        self._open: deque[Cycle] = deque()
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._method = b""
        self._spare_bytes = 0  # received since the last complete head or piece of a body
        self.on_lost: Callable[[], None] | None = None  # called when the connection is lost

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected; its first request head must arrive in time."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_head_timer()
        self._unset_keepalive_if_required()  # uvicorn keeps it, and all of this, after a reset
        super().connection_lost(exc)
        for cycle in self._open:
            cycle.leave()
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Bytes arrived; the timer runs while a head is incomplete."""
        self._unset_keepalive_if_required()
        self._spare_bytes += len(data)
        try:
            self._feed(data)
            if self._spare_bytes > MAX_HEAD_BYTES:
                raise httptools.HttpParserError("a head, a trailer or a chunk's line is too long")
        except httptools.HttpParserError:
            self._refuse()
        if self._open or self.timeout_keep_alive_task is not None:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._start_head_timer()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._open or self._method == b"CONNECT":
                raise httptools.HttpParserError("no other protocol is spoken here") from None
            self.parser = httptools.HttpRequestParser(self)
            self._feed(self._plain_head() + data[upgrade.args[0] :])

    def _plain_head(self) -> bytes:
        """The head that was just read, without its request to upgrade the protocol, at which the
        parser stops. Java's client asks for HTTP/2 in each request and sends the body all the same;
        uvicorn loses that body (its issue 2722)."""
        head = [b"%b %b HTTP/1.1\r\n" % (self._method, self.url)]
        head += [b"%b: %b\r\n" % line for line in self.headers if line[0] != b"upgrade"]
        return b"".join([*head, b"\r\n"])

    def _refuse(self) -> None:
        if self._open and self._open[0].response_started:
            self.transport.close()  # an answer has begun, so no error can be sent
        else:
            self.send_400_response("Invalid HTTP request received.")

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers are ignored."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Answer this request, or queue it after the one that is being answered."""
        self._spare_bytes = 0
        self._method = self.parser.get_method()
        if self.parser.should_upgrade():  # the parser calls again, without the upgrade
            return
        self._is_in_head = False
        version = self.parser.get_http_version()
        check_head(version, self.url, self.headers)
        url = _AUTHORITY.sub(b"", self.url) or b"/"  # as to a proxy: RFC 9112, 3.2.2
        path, _, query = url.partition(b"?")
        scope = cast("dict[str, Any]", self.scope)
        scope["method"] = self._method.decode("ascii")
        scope["http_version"] = version
        scope["path"] = self.root_path + unquote(path.decode("ascii"))
        scope["raw_path"] = self.root_path.encode("ascii") + path
        scope["query_string"] = query
        self.cycle = cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        scope["extensions"] = {EXTENSION: weakref.ref(cycle)}  # which holds the scope
        self._open.append(cycle)
        if len(self._open) == 1:
            self._answer(cycle)
        else:
            self.flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._spare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of the body."""
        if not self._is_in_head:
            self._spare_bytes = 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called by a cycle whose answer is complete: start the next one, or expect a new head."""
        self._open.popleft()
        if not self._open:
            super().on_response_complete()
        elif not self.transport.is_closing():
            self._answer(self._open[0])

    def _answer(self, cycle: Cycle) -> None:
        task = self.loop.create_task(cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._look_again)

    def _look_again(self) -> None:
        """The head is late, unless it came while the event loop stood still: that reads first."""
        self._head_timer = self.loop.call_later(LAST_LOOK_S, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def check_head(version: str, url: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse heads that the parser accepts but other programs on the way may read otherwise."""
    num_hosts, num_bytes = 0, len(url)
    for name, value in headers:
        num_bytes += len(name) + len(value) + 4
        if name == b"host":
            num_hosts += 1
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise httptools.HttpParserError("only chunks are known here")
    if version not in ("1.0", "1.1") or num_hosts > 1 or (version == "1.1" and not num_hosts):
        raise httptools.HttpParserError("not HTTP/1.0 or 1.1, or not one Host")
    if num_bytes > MAX_HEAD_BYTES:
        raise httptools.HttpParserError("the head is too long")


def has_left(connection: socket.socket) -> bool:
    """Whether a client that has just come sends no more, and sent no whole request: seen before
    anything is spent on it. False where that cannot be told: chunks, long requests."""
    poll, data = select.poll(), b""
    poll.register(connection, NO_MORE)
    if not poll.poll(0):
        return False
    with contextlib.suppress(OSError):
        data = connection.recv(PEEK_BYTES, socket.MSG_PEEK)
    head, end, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length:[ \t]*([0-9]{1,18})", head, re.IGNORECASE)
    missing = not end or (length is not None and len(body) < int(length[1]))
    return missing and len(data) < PEEK_BYTES
