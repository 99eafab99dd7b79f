"""HTTP below the app: what is taken, what is refused, and that one answer follows another."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from fastapi import APIRouter
from starlette.responses import Response

from fastdeploy_core.contracts.base import ApiRoutes
from fastdeploy_core.serving.plugin_routes import PluginRoutes
from fastdeploy_core.tokenizer import Tokenizer
from tests.server_support import LiveServer, ScriptedEngine, live, raw_request, wait_for

BODY = b'{"prompt":"Hi","max_tokens":3}'
STREAM = b'{"prompt":"Hi","max_tokens":3,"stream":true}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CLOSE = b"Connection: close\r\n"


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer, lambda prompt, index: "fine")


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine, tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """One server for the whole file: it must survive all of this."""
    with live(engine, tokenizer) as running:
        yield running


def talk(port: int, *pieces: bytes) -> bytes:
    """Everything that comes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        data = b""
        with contextlib.suppress(ConnectionError):  # it may be refused while we still send
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.01)
            while more := connection.recv(65536):
                data += more
        return data


def chunks(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + end


def with_length(body: bytes) -> bytes:
    return LENGTH % len(body) + b"\r\n" + body


TAKEN = {
    "a body with its length": POST + CLOSE + with_length(BODY),
    "a body in chunks": POST + CLOSE + CHUNKED + b"\r\n" + chunks(BODY[:7], BODY[7:]),
    "chunks with extensions": POST + CLOSE + CHUNKED + b"\r\n1e;a=b\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a wish for HTTP/2": POST + b"Connection: close, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n" + with_length(BODY),
    "a wish for HTTP/2, in chunks": POST + b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n"
    + CHUNKED + b"\r\n" + chunks(BODY),
    "HTTP/1.0": POST.replace(b"1.1", b"1.0") + with_length(BODY),
    "a URL, as to a proxy": POST.replace(b"/v1", b"HTTP://x:80/v1") + CLOSE + with_length(BODY),
    "a byte order mark": POST + CLOSE + with_length(b"\xef\xbb\xbf" + BODY),
    "empty lines in front": b"\r\n\r\n" + POST + CLOSE + with_length(BODY),
    "a large header": POST + CLOSE + b"X-A: " + b"a" * 40_000 + b"\r\n" + with_length(BODY),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("piece", [0, 11])
def test_a_request_is_taken_however_it_arrives(server: LiveServer, name: str, piece: int) -> None:
    data = TAKEN[name]
    if piece and len(data) > 1000:
        piece = 4096
    parts = [data[i : i + piece] for i in range(0, len(data), piece)] if piece else [data]
    answer = talk(server.port, *parts)
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    assert b'"text":"fin"' in answer


@pytest.mark.parametrize("path", ["/v1/models/http://x/y", "/versionhttp://x", "/loadHTTPS://x"])
def test_an_address_within_a_path_is_part_of_it(server: LiveServer, path: str) -> None:
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close".encode()
    assert raw_request(server.port, head)[0] == 404


REFUSED = {
    "no Host": b"POST /v1/completions HTTP/1.1\r\n"
    b"Content-Type: application/json\r\n" + with_length(BODY),
    "two Hosts": POST + b"Host: y\r\n" + with_length(BODY),
    "length and chunks": POST + CHUNKED + LENGTH % len(BODY) + b"\r\n" + chunks(BODY),
    "chunks and length": POST + LENGTH % len(BODY) + CHUNKED + b"\r\n" + chunks(BODY),
    "two lengths": POST + LENGTH % 3 + LENGTH % len(BODY) + b"\r\n" + BODY,
    "a length with a sign": POST + b"Content-Length: +30\r\n\r\n" + BODY,
    "space before a colon": POST + b"Content-Length : 30\r\n\r\n" + BODY,
    "a folded header": POST + b"X-A: a\r\n b\r\n" + with_length(BODY),
    "lines without CR": POST.replace(b"\r", b"")
    + LENGTH.replace(b"\r", b"") % len(BODY) + b"\n" + BODY,
    "another coding": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunks(BODY),
    "no chunks": POST + b"Transfer-Encoding: identity\r\n\r\n" + BODY,
    "a chunk's size": POST + CHUNKED + b"\r\n0x1e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk without its end": POST + CHUNKED + b"\r\n1e\r\n" + BODY + b"XX0\r\n\r\n",
    "NUL in a header": POST + b"X-A: a\0b\r\n" + with_length(BODY),
    "HTTP/0.9": b"GET /version\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "no method": b"BREW /version HTTP/1.1\r\nHost: x\r\n\r\n",
    "two wishes for HTTP/2": 2
    * (POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + with_length(BODY)),
    "a long head": POST + b"X-A: a\r\n" * 9000 + with_length(BODY),
    "a long header": POST + b"X-A: " + b"a" * 300_000,
    "a long target": b"GET /" + b"a" * 300_000,
    "a long trailer": POST + CHUNKED + b"\r\n" + chunks(BODY, end=b"0\r\nX-A: " + b"a" * 300_000),
    "a long extension": POST + CHUNKED + b"\r\n1e;a=" + b"a" * 300_000,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_others_may_read_differently_is_refused(
    server: LiveServer, name: str
) -> None:
    answer = talk(server.port, REFUSED[name])
    is_reset = not answer and len(REFUSED[name]) > 65536  # refused while we still sent
    assert is_reset or answer.startswith(b"HTTP/1.1 400 "), answer
    assert b"fin" not in answer
    assert httpx.get(server.url + "/version").status_code == 200


def test_trailers_are_no_headers(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    end = b"0\r\nAuthorization: Bearer key\r\n\r\n"
    request = POST + CLOSE + CHUNKED + b"\r\n" + chunks(BODY, end=end)
    with live(engine, tokenizer, api_keys=("key",)) as server:
        assert talk(server.port, request).startswith(b"HTTP/1.1 401 ")


def test_requests_in_a_row_are_answered_one_after_the_other(server: LiveServer) -> None:
    answer = talk(
        server.port,
        POST + with_length(STREAM) + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n",
        POST + CLOSE + with_length(BODY),
    )
    stream, version, whole = (b"[DONE]", b'"version"', b'"usage"')
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert 0 < answer.index(stream) < answer.index(version) < answer.index(whole)


def test_what_is_no_request_behind_one_does_not_reach_into_its_answer(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.pause_s, answer = 0.05, b""
    try:
        with (
            live(engine, tokenizer) as server,
            socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection,
        ):
            connection.sendall(POST + with_length(STREAM))
            while b"data: " not in answer:  # or nothing was answered yet, and all is refused
                answer += connection.recv(65536)
            connection.sendall(b"nonsense\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while more := connection.recv(65536):
                    answer += more
    finally:
        engine.pause_s = 0.0
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b" 400 " not in answer and b"Invalid" not in answer


def test_a_stream_for_http_1_0_ends_with_its_connection(server: LiveServer) -> None:
    answer = talk(server.port, POST.replace(b"1.1", b"1.0") + with_length(STREAM))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "status"), [("/version", 200), ("/v1/models", 200), ("/v1/completions", 405)]
)
def test_HEAD_is_answered_as_GET_without_a_body(server: LiveServer, path: str, status: int) -> None:
    head = f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close".encode()
    assert raw_request(server.port, head) == (status, b"")
    got = httpx.get(f"http://127.0.0.1:{server.port}{path}").headers
    headers = httpx.head(f"http://127.0.0.1:{server.port}{path}").headers
    assert headers["content-length"] == got["content-length"]


def test_a_client_that_leaves_behind_a_large_body_ends_its_request(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    """The connection is read again after a body for which it was paused."""
    body = b'{"prompt":"Hi","max_tokens":200,"ignore_eos":true,"user":"' + b"a" * 100_000 + b'"}'
    engine.pause_s, aborted = 0.02, engine.aborted
    engine.script = lambda prompt, index: "a" * 200
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(POST + LENGTH % len(body) + b"\r\n")
            time.sleep(0.1)  # it waits for the body
            connection.sendall(body)
            wait_for(lambda: engine.running, "the request to run")
        wait_for(lambda: engine.aborted == aborted + 1, "the request to end")
    finally:
        engine.pause_s = 0.0
        engine.script = lambda prompt, index: "fine"


def test_a_connection_that_only_breaks_lines_is_closed(
    engine: ScriptedEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastdeploy_core.serving.http.protocol import GuardedProtocol

    monkeypatch.setattr(GuardedProtocol, "head_timeout_s", 0.2)
    with (
        live(engine, tokenizer) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection,
    ):
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):  # head and body may come apart
            answer += (more := connection.recv(4096))
            assert more, answer
        began = time.monotonic()
        connection.sendall(b"\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        seconds = time.monotonic() - began
    assert seconds < server.state.config.keep_alive_s - 1


def test_a_connection_that_is_reset_while_idle_leaves_nothing(server: LiveServer) -> None:
    from fastdeploy_core.serving.http.protocol import GuardedProtocol

    def num_closed() -> int:
        """Connections that are closed, and in memory still."""
        gc.collect()
        # No isinstance: some objects of torch warn when they are asked for their class.
        found = [item for item in gc.get_objects() if issubclass(type(item), GuardedProtocol)]
        return sum(item.transport.is_closing() for item in found)

    for _ in range(8):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += (more := connection.recv(4096))
                assert more, answer
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for(lambda: num_closed() == 0, "them to be gone")


def test_a_head_that_came_while_the_server_stood_still_is_answered(
    engine: ScriptedEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastdeploy_core.serving.http.protocol import GuardedProtocol

    monkeypatch.setattr(GuardedProtocol, "head_timeout_s", 0.3)
    is_stuck, (asked, ask) = threading.Event(), socket.socketpair()

    def stand_still() -> None:
        asked.recv(1)
        is_stuck.set()
        time.sleep(0.6)

    async def watch() -> None:  # where the loop reads, since its timers come next
        asyncio.get_running_loop().add_reader(asked, stand_still)

    async def forget() -> None:
        asyncio.get_running_loop().remove_reader(asked)

    with (
        asked,
        ask,
        live(engine, tokenizer) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection,
    ):
        connections = server.server.server_state.connections
        wait_for(lambda: connections, "the connection to be taken")
        server.run(watch())
        ask.send(b"x")
        assert is_stuck.wait(60)
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        server.run(forget())


@pytest.mark.parametrize("path", ["short", "long", "split"])
def test_an_answer_that_is_not_as_it_says_ends_its_connection(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str
) -> None:
    """Or the client would take the rest for the next answer."""
    headers = {
        "short": {"content-length": "9"},
        "long": {"content-length": "3"},
        "split": {"x-a": "1\r\ncontent-length: 0"},
    }
    router = APIRouter()

    @router.get("/wrong")
    async def wrong() -> Response:
        return Response("five5", headers=headers[path])

    routes = PluginRoutes("x", "/plugins/x", ApiRoutes(router))
    with live(engine, tokenizer, plugins=[routes]) as server:
        request = b"GET /plugins/x/wrong HTTP/1.1\r\nHost: x\r\n\r\n"
        answer = talk(server.port, request)  # which returns when the server has closed
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body in ({"short": [b"five5"], "long": [b""]}.get(path) or [body])
    assert b"x-a" not in head
