"""Streams completions from a server and notes when each piece arrived; plain asyncio, HTTP/1.1.

It costs little per piece, because a benchmark's client shares the machine with the server.
`worker.py` runs it in several processes where one is not enough.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from fastdeploy_core.errors import ConfigError


class Measured(msgspec.Struct):
    """Measurements of one request; times in seconds since it was sent."""

    started_at: float = 0.0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    gaps_s: list[float] = []
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.e2e_s - self.ttft_s) / max(1, self.output_tokens - 1)


class Call(msgspec.Struct):
    """A request to be sent `due_s` after the start."""

    due_s: float
    path: str
    body: dict[str, Any]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    def has_output(self) -> bool:
        """Whether a user would see or count something in this piece."""
        delta = self.delta
        if delta is not None and (delta.content or delta.reasoning_content or delta.tool_calls):
            return True
        return bool(self.text or self.token_ids)


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str = "error"


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode
_DONE = b"[DONE]"


class _Connection(asyncio.Protocol):
    """A connection that answers one request after the other."""

    def __init__(self) -> None:
        self.is_open = False
        self._result = Measured()
        self._ended: asyncio.Future[None] | None = None  # None: idle
        self._last = 0.0
        self._data = b""
        self._rest = b""  # of the body, without chunk framing
        self._status = 0
        self._is_chunked = False
        self._left = -1  # remaining bytes of a body with a declared length
        self._transport: asyncio.Transport | None = None

    async def ask(self, request: bytes, result: Measured) -> bool:
        """Send a request and note how its answer arrives. False: the server closed before its
        answer began, as it may do with an idle connection."""
        self._result, self._last = result, result.started_at
        self._data, self._rest, self._status = b"", b"", 0
        self._ended = asyncio.get_running_loop().create_future()
        cast("asyncio.Transport", self._transport).write(request)
        try:
            await self._ended
        except asyncio.CancelledError:
            self.close()  # the server sees that nobody waits
            raise
        self._ended = None
        return self._status != 0

    def close(self) -> None:
        """Close: no further request."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is ready."""
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """A part of the answer arrived."""
        self._data += data
        try:
            if self._status or self._read_head():
                self._read_body()
        except (ValueError, msgspec.MsgspecError) as error:
            self._end(f"{type(error).__name__}: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended, which also ends an answer without a declared length."""
        self.is_open = False
        if self._last > self._result.started_at or self._status not in (0, 200):
            self._finish()
        else:
            self._end(f"{exc or 'no answer'}")

    def _read_head(self) -> bool:
        head, separator, rest = self._data.partition(b"\r\n\r\n")
        if not separator:
            return False
        self._data = rest
        self._status = int(head.split(b" ", 2)[1])
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        self._is_chunked = fields.get(b"transfer-encoding", b"").strip() == b"chunked"
        self._left = int(fields.get(b"content-length", -1))
        return True

    def _read_body(self) -> None:
        if not self._is_chunked:
            body, self._data = self._data, b""
            self._left -= len(body)
            self._take(body)
            if self._left == 0:
                self._finish()
            return
        data, start = self._data, 0
        while (line := data.find(b"\r\n", start)) >= 0:
            end = line + 2 + int(data[start:line], 16)
            if len(data) < end + 2:
                break
            if end == line + 2:
                self._finish()
                return
            self._take(data[line + 2 : end])
            start = end + 2
        self._data = data[start:]

    def _take(self, body: bytes) -> None:
        *events, self._rest = (self._rest + body).split(b"\n\n")
        if self._status != 200:
            return
        now = time.perf_counter()
        for event in events:
            content = event.removeprefix(b"data: ")
            if content != _DONE:
                self._note(_decode(content), now)

    def _note(self, event: _Event, now: float) -> None:
        result = self._result
        if event.error is not None:
            result.error = event.error.message
        if event.usage is not None:
            result.prompt_tokens = event.usage.prompt_tokens
            result.output_tokens = event.usage.completion_tokens
        if not any(choice.has_output() for choice in event.choices or ()):
            return
        if not result.ttft_s:
            result.ttft_s = now - result.started_at
        else:
            result.gaps_s.append(now - self._last)
        self._last = now

    def _finish(self) -> None:
        """The answer is complete."""
        if self._status == 200:
            self._end("")
            return
        try:
            self._end(f"{self._status} {_decode(self._rest).error or ''}")
        except msgspec.MsgspecError:
            self._end(f"{self._status}")

    def _end(self, error: str) -> None:
        if self._ended is None:  # idle
            return
        self._result.error = self._result.error or error
        self._result.e2e_s = self._last - self._result.started_at
        if not self._ended.done():
            self._ended.set_result(None)
        if error:  # the beginning of the next answer is unknown
            self.close()


class BenchClient:
    """A server's address, and connections that are kept for further requests."""

    def __init__(self, url: str, api_key: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"--url {url!r} is not an http:// address")
        self._host, self._port = parts.hostname, parts.port or 80
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._idle: deque[_Connection] = deque()

    async def measure(self, path: str, body: dict[str, Any]) -> Measured:
        """Send one streamed request and measure its answer."""
        raw = msgspec.json.encode(body)
        result = Measured(started_at=time.perf_counter())
        request = self._head("POST", path, len(raw), "keep-alive") + raw
        try:
            connection, is_kept = await self._connection()
            if not await connection.ask(request, result) and is_kept:
                result.error = ""
                connection = await self._connect()
                await connection.ask(request, result)
        except OSError as error:
            result.error = f"{type(error).__name__}: {error}"
            return result
        if connection.is_open:
            self._idle.append(connection)
        if not result.error and not result.ttft_s:
            result.error = "the answer was empty"
        return result

    async def _connection(self) -> tuple[_Connection, bool]:
        """An idle connection, and whether it was used before."""
        while self._idle:
            connection = self._idle.popleft()
            if connection.is_open:
                return connection, True
        return await self._connect(), False

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection

    async def send(
        self, calls: Sequence[Call], start_at: float, max_concurrency: int
    ) -> list[Measured]:
        """Send every call when it is due, whether or not earlier ones were answered."""
        room = asyncio.Semaphore(max_concurrency or len(calls) or 1)

        async def one(call: Call) -> Measured:
            await asyncio.sleep(max(0.0, start_at + call.due_s - time.perf_counter()))
            async with room:
                return await self.measure(call.path, call.body)

        return await asyncio.gather(*(one(call) for call in calls))

    def close(self) -> None:
        """Close idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def get(self, path: str) -> Any:
        """The JSON answer of a GET."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(self._head("GET", path, 0, "close"))
            await writer.drain()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        status = head.split(b" ", 2)[1:2]
        if status != [b"200"]:
            said = b"".join(status).decode("latin-1") or "nothing"
            raise ConfigError(
                f"GET {path} was answered with {said}; is --url right, or a key missing?"
            )
        return json.loads(body)

    def _head(self, method: str, path: str, length: int, connection: str) -> bytes:
        key = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
        return (
            f"{method} {self._base}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
            f"Connection: {connection}\r\n\r\n"
        ).encode("latin-1")
