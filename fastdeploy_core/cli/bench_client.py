"""Streams one completion from a server and notes when each piece came; plain asyncio, HTTP/1.1."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fastdeploy_core.errors import ConfigError

MAX_LINE_BYTES = 1 << 20


@dataclass(slots=True)
class Measured:
    """What one request showed; times in seconds since it was sent."""

    started_at: float = 0.0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.e2e_s - self.ttft_s) / max(1, self.output_tokens - 1)


class BenchClient:
    """A server's address."""

    def __init__(self, url: str, api_key: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"--url {url!r} is not an http:// address")
        self._host, self._port = parts.hostname, parts.port or 80
        self._base = parts.path.rstrip("/")
        self._key = api_key

    async def measure(self, path: str, body: dict[str, Any]) -> Measured:
        """Send one streamed request and watch its answer."""
        result = Measured(started_at=time.perf_counter())
        last = result.started_at
        try:
            async for event in self._events(path, body):
                now = time.perf_counter()
                if "error" in event:
                    result.error = str(event["error"].get("message", "error"))
                    break
                if usage := event.get("usage"):
                    result.prompt_tokens = usage["prompt_tokens"]
                    result.output_tokens = usage["completion_tokens"]
                if not _has_output(event):
                    continue
                if not result.ttft_s:
                    result.ttft_s = now - result.started_at
                else:
                    result.gaps_s.append(now - last)
                last = now
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            result.error = f"{type(error).__name__}: {error}"
        result.e2e_s = last - result.started_at
        if not result.error and not result.ttft_s:
            result.error = "the answer was empty"
        return result

    async def get(self, path: str) -> Any:
        """The JSON of a GET."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(self._head("GET", path, 0))
            await writer.drain()
            status, chunked, length = await _read_head(reader)
            pieces = [piece async for piece in _body(reader, chunked, length)]
        finally:
            writer.close()
        if status != 200:
            raise ConfigError(
                f"GET {path} was answered with {status}; is --url right, or a key missing?"
            )
        return json.loads(b"".join(pieces))

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        raw = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=MAX_LINE_BYTES)
        try:
            writer.write(self._head("POST", path, len(raw)) + raw)
            await writer.drain()
            status, chunked, length = await _read_head(reader)
            rest = b""
            async for piece in _body(reader, chunked, length):
                rest += piece
                if status != 200:
                    continue
                *events, rest = rest.split(b"\n\n")
                for event in events:
                    if event.startswith(b"data: ") and event != b"data: [DONE]":
                        yield json.loads(event[6:])
            if status != 200:
                content = json.loads(rest)
                error = content.get("error", {})
                yield {"error": {"message": f"{status} {error.get('message', '')}"}}
        finally:
            writer.close()

    def _head(self, method: str, path: str, length: int) -> bytes:
        key = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
        return (
            f"{method} {self._base}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
            "Connection: close\r\n\r\n"
        ).encode("latin-1")


def _has_output(event: dict[str, Any]) -> bool:
    for choice in event.get("choices") or []:
        delta = choice.get("delta")
        if delta is None:
            if choice.get("text") or choice.get("token_ids"):
                return True
        elif any(
            delta.get(name) for name in ("content", "reasoning_content", "tool_calls")
        ) or choice.get("token_ids"):
            return True
    return False


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool, int | None]:
    """Status, whether the body is chunked, its length if declared."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    chunked, length = False, None
    for line in lines:
        name, _, value = line.partition(":")
        if name.lower() == "transfer-encoding":
            chunked = "chunked" in value.lower()
        elif name.lower() == "content-length":
            length = int(value)
    return int(first.split(" ")[1]), chunked, length


async def _body(
    reader: asyncio.StreamReader, chunked: bool, length: int | None
) -> AsyncIterator[bytes]:
    if not chunked:
        yield await reader.readexactly(length) if length is not None else await reader.read()
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
