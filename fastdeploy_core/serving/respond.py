"""Sends answers: one JSON body or a stream of events; notices clients that leave.

A job is prepared (templates, tokens, grammar) and runs under a permit, which is always released. A
stream's first event is made before the status line is sent, so an early failure has its own status;
a later failure is sent as an event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastdeploy_core.errors import Aborted
from fastdeploy_core.serving.http.errors import to_api_error
from fastdeploy_core.serving.http.protocol import Cycle, connection_of

from .state import ServerState

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
Events = AsyncGenerator[dict[str, Any], None]
Frames = Callable[[dict[str, Any] | None, Events], AsyncGenerator[bytes, None]]


class Job(Protocol):
    """One API call: what it needs, and its two forms of answer."""

    stream: bool

    @property
    def num_requests(self) -> int:
        """Engine requests that the call will make."""

    async def prepare(self) -> None:
        """All work before the engine requests; raises errors of the call."""

    async def complete(self) -> dict[str, Any]:
        """The whole answer."""

    def events(self) -> Events:
        """The chunks of a streamed answer."""


async def answer(
    http: Request, state: ServerState, job: Job, frames: Frames | None = None
) -> Response:
    """Run a job and answer with its result; `frames` writes the events of another API."""
    state.admission.enter(job.num_requests)
    handed_over = False
    try:
        async with WhileConnected(connection_of(http.scope)):
            if not job.stream:
                await job.prepare()
                return json_response(await job.complete())
            events = job.events()
            first = await _prepare_and_start(job, events)
            handed_over = True
            stall_s = state.config.stream_stall_timeout_s
            leave = partial(state.admission.leave, job.num_requests)
            return EventStream((frames or framed)(first, events), stall_s, leave)
        raise Aborted("the client left before the answer was complete")
    finally:
        if not handed_over:
            state.admission.leave(job.num_requests)


async def _prepare_and_start(job: Job, events: Events) -> dict[str, Any] | None:
    try:
        await job.prepare()
        return await anext(events, None)
    except BaseException:
        await events.aclose()
        raise


def json_response(body: Any, status: int = 200) -> Response:
    """A JSON body; msgspec writes NaN and infinity as null, which is valid JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def framed(first: dict[str, Any] | None, events: Events) -> AsyncGenerator[bytes, None]:
    """Server-sent events; a failure becomes an event too, and [DONE] is always last."""
    try:
        if first is not None:
            yield frame(first)
        async for event in events:
            yield frame(event)
    except Exception as error:
        yield frame(to_api_error(error).body())
    finally:
        await events.aclose()
    yield DONE


def frame(event: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


class WhileConnected:
    """A context that ends early, without an error, when the client leaves. One task enters it."""

    def __init__(self, connection: Cycle | None) -> None:
        self._connection = connection
        self._has_left = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._cancelling = 0 if self._task is None else self._task.cancelling()
        if self._connection is not None:
            self._connection.watch(self._on_left)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if self._connection is not None:
            self._connection.watch(None)
        if not self._has_left or self._task is None:
            return False
        return self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError

    def _on_left(self) -> None:
        if self._task is not None and not self._has_left:
            self._has_left = True
            self._task.cancel()


class EventStream(Response):
    """A streamed body: stops when the client leaves, and drops a client that does not read.

    It waits while the connection's write buffer is full, so a slow reader slows only its own
    stream. Meanwhile the engine's output for it waits as token ids.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], stall_s: float, on_close: Callable[[], None]
    ) -> None:
        super().__init__(None)
        self._events = events
        self._stall_s = stall_s
        self._on_close = on_close
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        connection = connection_of(scope)
        knows_chunks = scope["http_version"] == "1.1"
        try:
            async with WhileConnected(connection):
                await self._pump(send, connection if knows_chunks else None)
        except TimeoutError:
            logger.warning("a client stopped reading its stream for %.0f s", self._stall_s)
            if connection is not None:
                connection.abort()
        finally:
            await self._events.aclose()
            self._on_close()

    async def _pump(self, send: Send, connection: Cycle | None) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for data in self._events:
            if connection is None:
                async with asyncio.timeout(self._stall_s):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            elif connection.write(data):
                async with asyncio.timeout(self._stall_s):
                    await connection.drain()
        await send({"type": "http.response.body", "body": b""})
