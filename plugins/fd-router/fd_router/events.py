"""Server-sent events of an answer, whole ones only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp

from .instances import Call, InstanceFailed

DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 16 * 2**20


def frame(event: Mapping[str, Any]) -> bytes:
    """One event."""
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


class Events:
    """The events of one instance's stream. A stream ends with [DONE]; every other end is a failure
    of the instance."""

    def __init__(self, call: Call, answer: aiohttp.ClientResponse) -> None:
        self._call = call
        self._content = answer.content
        self._rest = bytearray()
        self.done = False

    async def next(self) -> bytes:
        """What came since: one whole event or more; empty after [DONE]. InstanceFailed when the
        stream breaks off, stalls, or is none."""
        while not self.done:
            try:
                data = await self._call.bounded(self._content.readany)
            except (aiohttp.ClientError, OSError) as error:
                raise InstanceFailed(f"broke a stream off: {type(error).__name__}") from None
            if not data:
                raise InstanceFailed("ended a stream without [DONE]")
            self._call.first_token()
            self._rest += data
            end = self._rest.rfind(b"\n\n") + 2
            if end >= 2:
                events = bytes(self._rest[:end])
                del self._rest[:end]
                self.done = events.endswith(DONE)
                return events
            if len(self._rest) > MAX_EVENT_BYTES:
                raise InstanceFailed(f"sent an event of more than {MAX_EVENT_BYTES} bytes")
        return b""


def parsed(events: bytes) -> list[dict[str, Any]]:
    """The JSON objects of whole events, [DONE] left out; InstanceFailed for anything else, and for
    the event by which an instance says that its engine died."""
    return [event for _, event in each(events)]


def each(events: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The same one by one, each after the bytes that it came as."""
    for part in events.split(b"\n\n"):
        if not part or part == DONE.strip():
            continue
        try:
            event = json.loads(part.removeprefix(b"data: "))
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise InstanceFailed("sent an event that is no JSON object")
        error = event.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and code >= 500 and code != 504:
            raise InstanceFailed(f"ended a stream with error {code}")
        yield part + b"\n\n", event
