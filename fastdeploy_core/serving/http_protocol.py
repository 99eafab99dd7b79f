"""uvicorn's h11 protocol with a time limit on request heads, a short way for streamed bodies, and a
way to drop a dead connection.

h11 is pinned because it bounds the size of request heads; with the other parser megabytes of
headers reach the application.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .respond import CONNECTION_EXTENSION

HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 * 1024


class OneSendATurn:
    """A transport: what is written in one turn of the event loop leaves as one. A send takes some 20 us
    of processor time, and the reader as much; the head of a stream and its first chunk, and its last
    chunks and its end, are written together."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Soon."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """Behind what was written."""
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))


class GuardedProtocol(H11Protocol):
    """One connection."""

    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self.on_lost: Callable[[], None] | None = None  # for who wants to know
        inner: ASGIApp = self.app

        async def with_connection(scope: Scope, receive: Receive, send: Send) -> None:
            scope.setdefault("extensions", {})[CONNECTION_EXTENSION] = self
            await inner(scope, receive, send)

        self.app = with_connection

    # What respond.py's Connection is.

    def abort(self) -> None:
        """Close at once; what waits to be sent is lost."""
        self.transport.abort()

    def write(self, data: bytes) -> bool:
        """A part of a streamed body, framed here as h11 would. True: wait for drain() before more."""
        cycle = self.cycle
        if not cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return self.flow.write_paused and not cycle.disconnected

    async def drain(self) -> None:
        """Wait until the client has read enough."""
        await self.flow.drain()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected; its first request head must come in time."""
        super().connection_made(cast("asyncio.Transport", OneSendATurn(transport, self.loop)))
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Bytes came: the timer runs while a head is incomplete."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            if self._head_timer is None:
                self._start_head_timer()
        else:
            self._stop_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_head_timer()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
