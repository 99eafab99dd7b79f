"""uvicorn with an orderly end: drain on the first signal, stop on the second, exit code from the
engine.

While it drains, the port stays open and answers 503, so a load balancer sees /health/ready fail
instead of refused connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.serving.front.occupancy import OwnOccupancy
from fastdeploy_core.serving.http.protocol import GuardedProtocol, has_left

if TYPE_CHECKING:
    from fastdeploy_core.engine.client import AsyncEngine

logger = logging.getLogger(__name__)

LAST_WORDS_S = 3.0  # for error events and closing connections, after the grace period
MAX_LOOKS = 64  # at new connections, in one turn of the event loop
NEW_S = 0.002
TICK_S = 1.0  # instead of uvicorn's 0.1 s, which only serve to notice the end
_POLL_S = 0.05


class ApiServer(uvicorn.Server):
    """One app: on a listening socket, or on connections that a front door hands over."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        self._engine: AsyncEngine = app.state.server.engine
        self._admission = app.state.server.admission
        self._occupancy: OwnOccupancy = app.state.server.occupancy
        self._arrived: deque[socket.socket] = deque()
        self._adopting: set[asyncio.Task[None]] = set()
        self._grace_s = config.grace_s
        self._draining: asyncio.Task[None] | None = None
        self._leaving = asyncio.Event()
        self.exit_code = 0
        super().__init__(
            uvicorn.Config(
                app,
                http=GuardedProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # client addresses are not used
                timeout_keep_alive=max(1, round(config.keep_alive_s)),
                timeout_graceful_shutdown=round(LAST_WORDS_S),
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
            )
        )

    def adopt(self, connection: socket.socket) -> None:
        """Serve a connection that another thread or process has accepted."""
        self._arrived.append(connection)
        if len(self._arrived) == 1:
            asyncio.get_running_loop().call_soon(self._adopt_some, time.monotonic())

    def _adopt_some(self, last_s: float) -> None:
        """Take one new connection in this turn of the event loop, and one more for each NEW_S since
        the last: however many come, most of the time belongs to those that are there."""
        loop, now_s = asyncio.get_running_loop(), time.monotonic()
        room = 1 + int((now_s - last_s) / NEW_S)
        for _ in range(min(MAX_LOOKS, len(self._arrived))):
            connection = self._arrived.popleft()
            if has_left(connection):
                connection.close()
                self._occupancy.closed()
                continue
            task = loop.create_task(self._adopt(connection))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)
            room -= 1
            if not room:
                break
        if self._arrived:
            loop.call_soon(self._adopt_some, now_s)

    async def _adopt(self, connection: socket.socket) -> None:
        loop, config = asyncio.get_running_loop(), self.config

        def protocol() -> GuardedProtocol:
            made = GuardedProtocol(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            made.on_lost = self._occupancy.closed
            return made

        try:
            await loop.connect_accepted_socket(protocol, connection, ssl=config.ssl)
        except (OSError, ConnectionError) as error:  # the client left, or its TLS handshake failed
            logger.debug("a connection was lost before it began: %s", error)
            connection.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Called by uvicorn around serving. Signals reach `stop` through launch.py instead, so that
        they also work before the server exists."""
        yield

    def stop(self) -> None:
        """First call: drain, then exit. Second call: exit now."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            logger.warning("second signal: stopping now")
            self.force_exit = True
            self.leave()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's shutdown. When told to stop now, uvicorn leaves the application's end to the
        event loop, which would log it as an error."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def leave(self) -> None:
        """End without waiting for running answers."""
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        """uvicorn's main loop, which updates the date header, with longer sleeps."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), TICK_S)

    def engine_died(self, reason: str) -> None:
        """The engine has ended for good: nothing can be answered, so the process ends in error."""
        logger.error("engine is dead: %s", reason)
        self.exit_code = 1
        self.leave()

    async def _drain(self) -> None:
        self._occupancy.table.drain()
        count, grace_s = self._admission.in_flight, self._grace_s
        said = "shutting down: %d requests in flight get up to %g s, new ones are refused"
        logger.info(said, count, grace_s)
        await self._until_idle(self._grace_s)
        # The engine fails what still runs, so every stream ends with an error event.
        await self._engine.drain(0.0)
        await self._until_idle(LAST_WORDS_S)
        self.leave()

    async def _until_idle(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._admission.in_flight and time.monotonic() < deadline and not self.should_exit:
            await asyncio.sleep(_POLL_S)
