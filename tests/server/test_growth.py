"""No request, and no way to end one, leaves an object in the API server's process."""

from __future__ import annotations

import contextlib
import gc
import socket
import struct
from collections import Counter
from typing import Any

import httpx

from fastdeploy_core.tokenizer import Tokenizer
from tests.server_support import LiveServer, ScriptedEngine, live, wait_for

NUM_TURNS = 10
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"stream": True},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "top_k": 7},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 2, "temperature": 0.9},
    {"stop": ["wor"]},
    {"logit_bias": {"5": 1}},
    {"presence_penalty": 0.5, "repetition_penalty": 1.1, "bad_words": ["x"]},
    {"max_tokens": -1},
    {"tools": 3},
)
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
UNFINISHED = (b"", b"nonsense\r\n\r\n", POST, POST + b'Content-Length: 100\r\n\r\n{"a": ')
PATHS = (("GET", "/version"), ("GET", "/metrics"), ("GET", "/nowhere"), ("PUT", "/v1/models"))


def turn(server: LiveServer, name: int) -> None:
    """Requests of every kind, each turn's with texts and ids of its own."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for fields in FIELDS:
            body = {"messages": [{"role": "user", "content": f"{name} {fields}"}], **fields}
            headers = {"X-Request-Id": f"{name}-{len(str(fields))}"}
            client.post("/v1/chat/completions", json=body, headers=headers)
        for method, path in PATHS:
            client.request(method, path)
    for sent in UNFINISHED:
        for is_reset in (False, True):
            leave(server, sent, is_reset=is_reset)
    for is_reset in (False, True):
        whole = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
        leave(server, POST + b"Content-Length: %d\r\n\r\n" % len(whole) + whole, is_reset=is_reset)
        leave(server, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n", is_reset=is_reset, is_heard=True)


def leave(server: LiveServer, sent: bytes, *, is_reset: bool, is_heard: bool = False) -> None:
    """Send something, hear the answer's beginning or not, and leave."""
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection,
    ):
        connection.sendall(sent)
        if is_heard:
            connection.recv(4096)
        if is_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_requests_leave_nothing(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    def objects() -> Counter[str]:
        engine.requests.clear()
        gc.collect()
        return Counter(type(item).__qualname__ for item in gc.get_objects())

    def grown() -> dict[str, int]:
        """Kinds of which each turn has left one, or more."""
        return {n: more for n, more in (objects() - before).items() if more >= NUM_TURNS}

    with live(engine, tokenizer) as server:
        for name in range(3):  # pools fill, caches are made
            turn(server, name)
            objects()
        before = objects()
        for name in range(3, 3 + NUM_TURNS):
            turn(server, name)
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not grown(), "nothing to be left")
        assert not grown()
