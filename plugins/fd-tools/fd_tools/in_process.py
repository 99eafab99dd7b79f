"""Calls an app without a socket, so that batch files use the same routes as HTTP clients."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.types import Message


async def call(app: FastAPI, method: str, path: str, body: Any) -> tuple[int, str, Any]:
    """Status, request id and decoded JSON body of one call."""
    raw = msgspec.json.encode(body)
    sent = False
    status = 0
    request_id = ""
    pieces: list[bytes] = []

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": raw, "more_body": False}
        # the caller stays connected until it is answered
        await asyncio.get_running_loop().create_future()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = dict(message.get("headers", []))
            request_id = headers.get(b"x-request-id", b"").decode("ascii")
        else:
            pieces.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8"),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {},
    }
    await app(scope, receive, send)
    return status, request_id, msgspec.json.decode(b"".join(pieces))
