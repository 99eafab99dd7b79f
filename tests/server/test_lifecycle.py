"""Clients that leave or do not read, queues that are full, engines that fail, servers that end."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from fastdeploy_core.engine.stream import OutputStream
from fastdeploy_core.errors import (
    ConfigError,
    InvalidRequest,
    QueueFull,
    RequestTimeout,
    Unavailable,
    WorkerError,
)
from fastdeploy_core.serving.http.listening import bind_socket
from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_core.types import FinishReason, Request, RequestOutputDelta, SequenceDelta
from tests.server_support import (
    LiveServer,
    ScriptedEngine,
    events_of,
    live,
    server_config,
    wait_for,
)

BODY = {"prompt": "x", "max_tokens": 400}


@pytest.fixture
def gate(engine: ScriptedEngine) -> Iterator[threading.Event]:
    """Answers stop after their first token until it is set."""
    engine.gate = threading.Event()
    yield engine.gate
    engine.gate.set()


def send(server: LiveServer, body: dict) -> socket.socket:
    """A completion request on a connection that the test can close as it likes."""
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(
    engine: ScriptedEngine, server: LiveServer, gate: threading.Event, stream: bool
) -> None:
    connection = send(server, {**BODY, "stream": stream})
    wait_for(lambda: engine.running == 1, "the request to run")
    connection.close()
    wait_for(lambda: engine.running == 0, "the request to be aborted")
    assert engine.aborted == 1
    wait_for(lambda: server.state.admission.in_flight == 0, "the permit to come back")
    assert len(server.state.outputs) == 0
    assert 'requests_aborted_total{model_name="tiny"} 1.0' in metrics(server)


def test_all_prompts_of_a_call_end_when_its_client_leaves(
    engine: ScriptedEngine, server: LiveServer, gate: threading.Event
) -> None:
    connection = send(server, {"prompt": ["a", "b", "c"], "stream": True})
    wait_for(lambda: engine.running == 3, "the requests to run")
    connection.close()
    wait_for(lambda: engine.running == 0, "the requests to be aborted")
    wait_for(lambda: server.state.admission.in_flight == 0, "the permits to come back")


def test_a_storm_of_clients_that_leave_at_once_leaves_nothing(
    engine: ScriptedEngine, server: LiveServer, client: httpx.Client
) -> None:
    engine.pause_s = 0.01
    for number in range(200):
        send(server, {**BODY, "stream": number % 2 == 0}).close()
    wait_for(
        lambda: engine.running == 0 and server.state.admission.in_flight == 0,
        "everything to be given back",
    )
    wait_for(lambda: len(server.server.server_state.connections) <= 1, "connections to close")
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_a_client_that_does_not_read_is_dropped(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.info.max_model_len = 10_000_000
    engine.script = lambda prompt, index: "y" * 100_000
    with live(engine, tokenizer, stream_stall_timeout_s=0.3) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        raw = json.dumps({"prompt": "x", "max_tokens": 90_000, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
        wait_for(lambda: engine.running == 1 or engine.aborted == 1, "the request to run")
        with httpx.Client(base_url=server.url) as other:  # others are served meanwhile
            assert other.get("/version").status_code == 200
        wait_for(lambda: engine.running == 0, "the slow reader to be dropped")
        assert engine.aborted == 1
        wait_for(lambda: not server.server.server_state.connections, "its connection to close")
        connection.close()


def test_requests_beyond_the_limit_are_refused_at_once(
    engine: ScriptedEngine, tokenizer: Tokenizer, gate: threading.Event
) -> None:
    with (
        live(engine, tokenizer, max_concurrency=2) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        held = [threads.submit(client.post, "/v1/completions", json=BODY) for _ in range(2)]
        wait_for(lambda: engine.running == 2, "the requests to run")
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert client.post("/v1/completions", json={"prompt": ["a"] * 3}).status_code == 400
        assert client.get("/load").json() == {"server_load": 2}
        assert 'requests_rejected_total{model_name="tiny",reason="queue_full"} 1.0' in metrics(
            server
        )
        gate.set()
        assert [future.result().status_code for future in held] == [200, 200]
        assert client.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFull("queue full", retry_after_s=3.2), 429),
        (WorkerError("died at 0xdeadbeef"), 503),
    ],
)
def test_an_engine_that_takes_nothing_refuses_before_tokenizing(
    engine: ScriptedEngine, client: httpx.Client, error: Exception, status: int
) -> None:
    engine.refuse = error  # type: ignore[assignment]
    # The prompt is far too long, which would be a 400 if anybody had looked at it.
    response = client.post("/v1/completions", json={"prompt": "x" * 5000})
    assert response.status_code == status
    assert int(response.headers["retry-after"]) >= 1
    assert "0x" not in response.text
    engine.refuse = None
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (WorkerError("worker 3 was killed, see /var/log/x"), 503),
        (WorkerError("driver shutting down, see /var/log/x; try again later"), 503),
        (Unavailable("the request queue does not answer"), 503),
        (QueueFull("the queue is full"), 429),
        (RequestTimeout("waited longer than 900 s"), 503),
        (RequestTimeout("the deadline of 2 s has passed"), 504),
        (InvalidRequest("token out of range", param="prompt"), 400),
        (RuntimeError("bug at 0x7f0000000000"), 500),
    ],
)
def test_a_failure_while_running_has_its_status_or_ends_the_stream(
    engine: ScriptedEngine, client: httpx.Client, error: Exception, status: int
) -> None:
    engine.fail = error  # type: ignore[assignment]
    response = client.post("/v1/completions", json=BODY)
    assert response.status_code == status
    with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as streamed:
        assert streamed.status_code == 200
        *chunks, last = events_of(streamed)
    assert chunks
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert last["error"]["code"] == status
    assert last == response.json()
    # Only an error meant for clients is shown to them.
    assert not any(word in response.text for word in ("0x7f", "/var/log", "bug"))
    assert (type(error) in (WorkerError, RuntimeError)) is not (str(error) in response.text)
    engine.fail = None
    assert client.post("/v1/completions", json=BODY).status_code == 200
    assert client.get("/load").json() == {"server_load": 0}


def test_health_tells_a_sick_engine_and_nothing_else(
    engine: ScriptedEngine, client: httpx.Client
) -> None:
    for path in ("/health", "/health/ready", "/health/live", "/ping"):
        assert client.get(path).status_code == 200
    engine.well = False
    for path in ("/health", "/health/ready", "/ping"):
        response = client.get(path)
        assert response.status_code == 503
        assert "no step for 31 s" in response.json()["reason"]
        assert "/usr/lib" not in response.text
    assert client.post("/ping").status_code == 503
    assert client.get("/health/live").status_code == 200
    assert "fastdeploy:engine_ready" in client.get("/metrics").text


def test_draining_finishes_what_runs_and_refuses_what_is_new(
    engine: ScriptedEngine, tokenizer: Tokenizer, gate: threading.Event
) -> None:
    with (
        live(engine, tokenizer) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        whole = threads.submit(client.post, "/v1/completions", json=BODY)
        body = {**BODY, "stream": True}
        streamed = threads.submit(httpx.post, server.url + "/v1/completions", json=body)
        wait_for(lambda: engine.running == 2, "the requests to run")
        server.signal()
        wait_for(lambda: client.get("/health/ready").status_code == 503, "ready to turn red")
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert client.get("/health/live").status_code == 200
        gate.set()
        assert whole.result().json()["choices"][0]["finish_reason"] == "stop"
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"stop"' in streamed.result().text
        assert server.join()
        assert server.server.exit_code == 0


@pytest.mark.filterwarnings("ignore:The `root_path` parameter is deprecated")
def test_an_operator_drains_a_server_that_goes_on(
    engine: ScriptedEngine, tokenizer: Tokenizer, gate: threading.Event
) -> None:
    keys = {"api_keys": ("client",), "admin_key": "operator"}
    with (
        live(engine, tokenizer, **keys, root_path="/behind") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(1) as threads,
    ):
        client = {"Authorization": "Bearer client"}
        operator = {"Authorization": "Bearer operator"}
        body = {**BODY, "stream": True}
        streamed = threads.submit(http.post, "/v1/completions", json=body, headers=client)
        wait_for(lambda: engine.running == 1, "the request to run")
        for path in ("/drain", "/behind/drain"):
            for headers in ({}, client, {"Authorization": "Bearer"}, {"X-Api-Key": "client"}):
                assert http.post(path, headers=headers).status_code == 401
        assert http.get("/drain", headers=operator).status_code == 405
        assert http.post("/tokenize", json={"prompt": "x"}, headers=operator).status_code == 401
        for path in ("/health/ready", "/behind/health/ready"):
            assert http.get(path).status_code == 200
        assert http.get("/behind/v1/models").status_code == 401
        for _ in range(2):
            answer = http.post("/drain", headers=operator)
            assert answer.json() == {"status": "draining", "server_load": 1}
        assert http.get("/health/ready").json() == {"status": "draining"}
        assert http.get("/health").status_code == 200
        refused = http.post("/v1/completions", json=BODY, headers=client)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["message"] == "this server takes no new requests"
        gate.set()
        assert '"finish_reason":"stop"' in streamed.result().text
        assert http.get("/load", headers=client).json() == {"server_load": 0}
        assert http.get("/metrics", headers=client).status_code == 200
        server.signal()
        assert server.join()


def test_without_its_key_there_is_nothing_to_drain(client: httpx.Client) -> None:
    assert client.post("/drain").status_code == 404
    assert client.get("/health/ready").status_code == 200


def test_what_outlives_the_grace_ends_with_an_error_event(
    engine: ScriptedEngine, tokenizer: Tokenizer, gate: threading.Event
) -> None:
    with live(engine, tokenizer, grace_s=0.1) as server, ThreadPoolExecutor(1) as threads:
        body = {**BODY, "stream": True}
        answer = threads.submit(httpx.post, server.url + "/v1/completions", json=body)
        wait_for(lambda: engine.running == 1, "the request to run")
        server.signal()
        assert server.join()
        text = answer.result().text
        assert '"error"' in text
        assert '"finish_reason":"stop"' not in text
        assert text.endswith("data: [DONE]\n\n")


def test_a_second_signal_ends_at_once(
    engine: ScriptedEngine,
    tokenizer: Tokenizer,
    gate: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with live(engine, tokenizer, grace_s=600) as server:
        connection = send(server, {**BODY, "stream": True})
        wait_for(lambda: engine.running == 1, "the request to run")
        server.signal()
        wait_for(lambda: server.state.occupancy.table.is_draining, "draining")
        server.signal()
        assert server.join()
        connection.close()
    assert "Traceback" not in caplog.text  # the application was ended, too


def test_a_dead_engine_ends_the_server_with_an_error_code(server: LiveServer) -> None:
    server.server.engine_died("killed by signal 9")
    assert server.join()
    assert server.server.exit_code == 1


def test_a_port_in_use_is_one_line(server: LiveServer) -> None:
    with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{server.port}: .*in use"):
        bind_socket(server_config(port=server.port))


def test_an_idle_socket_is_closed(
    engine: ScriptedEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastdeploy_core.serving.http.protocol import GuardedProtocol

    monkeypatch.setattr(GuardedProtocol, "head_timeout_s", 0.2)
    with live(engine, tokenizer) as server:
        for sent in (b"", b"GET /version HT", b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: "):
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=60) as slow,
                contextlib.suppress(ConnectionError),  # the same, said differently
            ):
                slow.sendall(sent)
                assert slow.recv(1) == b""


def test_a_body_that_never_arrives_is_given_up(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    with live(engine, tokenizer, body_timeout_s=0.2) as server:
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as slow:
            slow.sendall(head + b"Content-Length: 100\r\n\r\n{")
            assert b" 408 " in slow.recv(4096)


def metrics(server: LiveServer) -> str:
    return httpx.get(server.url + "/metrics").text


def test_small_answers_on_a_kept_connection_do_not_wait(client: httpx.Client) -> None:
    """With Nagle's delay each would take 40 ms, whatever the machine."""
    client.get("/version")
    took = (client.get("/version").elapsed.total_seconds() for _ in range(500))
    assert any(seconds < 0.03 for seconds in took)


class FailsAtOnce(ScriptedEngine):
    """Tokens and the error that follows them reach the API server in one batch."""

    async def generate(
        self, request: Request, chunk_tokens: int = 1
    ) -> AsyncIterator[RequestOutputDelta]:
        stream = OutputStream(request, chunk_tokens)
        tokens = SequenceDelta(token_ids=self.tokenizer.encode("Hel"))
        stream.put(RequestOutputDelta(request_id=request.request_id, sequences=[tokens]))
        stream.put(
            RequestOutputDelta(
                request_id=request.request_id,
                position=1,
                sequences=[SequenceDelta(finish_reason=FinishReason.ERROR)],
                finished=True,
                error="the engine has died",
                error_type="WorkerError",
            )
        )
        while True:
            yield await stream.get()


def test_tokens_that_come_with_their_error_are_no_answer(tokenizer: Tokenizer) -> None:
    engine = FailsAtOnce(tokenizer, lambda prompt, index: "")
    with live(engine, tokenizer) as server, httpx.Client(base_url=server.url) as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = {**BODY, "messages": [{"role": "user", "content": "x"}]}
            assert client.post(path, json=body).status_code == 503
            with client.stream("POST", path, json={**body, "stream": True}) as streamed:
                *chunks, last = events_of(streamed)
            assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
            assert last["error"]["code"] == 503
