"""`fastdeploy router` in front of real servers."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from conftest import ADMIN, Pair, Router, serve
from prometheus_client.parser import text_string_to_metric_families
from server_support import wait_for

CHAT = {"messages": [{"role": "user", "content": "Tell me a story"}]}
LONG = {"ignore_eos": True, "max_tokens": 150}


def _events(response: httpx.Response, begun: threading.Event | None = None) -> list[dict]:
    """The events of a whole stream; [DONE] has to be last, and there only. begun: set when there
    is text."""
    lines: list[str] = []
    for line in response.iter_lines():
        lines += [line] if line else []
        if begun is not None and len(lines) > 1:
            begun.set()
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _stream(url: str, path: str, body: dict, begun: threading.Event | None = None) -> list[dict]:
    with httpx.stream("POST", url + path, json={**body, "stream": True}, timeout=60) as response:
        assert response.status_code == 200, response.read()
        return _events(response, begun)


def _text(events: list[dict]) -> str:
    """The text of a stream of either kind; of several choices, one after the other."""
    choices = [choice for event in events for choice in event.get("choices", ())]
    choices.sort(key=lambda choice: choice["index"])  # one after the other, each in its order
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def _without_id(event: dict) -> dict:
    return {name: value for name, value in event.items() if name not in ("id", "created")}


# ---------------------------------------------------------------- what is passed on


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 7}])
def test_openai_client_gets_the_same_answers_as_directly(pair: Pair, sampling: dict) -> None:
    def answers(url: str) -> list[object]:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        model = client.models.list().data[0].id
        chat = client.chat.completions.create(model=model, max_tokens=24, **CHAT, **sampling)
        text = client.completions.create(model=model, prompt="Once", max_tokens=24, **sampling)
        chat_stream = client.chat.completions.create(
            model=model,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            **CHAT,
            **sampling,
        )
        deltas = list(chat_stream)
        return [
            model,
            chat.choices[0].message.content,
            text.choices[0].text,
            "".join(event.choices[0].delta.content or "" for event in deltas if event.choices),
            deltas[-1].usage.completion_tokens,
            deltas[-2].choices[0].finish_reason,
        ]

    direct = answers(pair.servers[0].url)
    assert direct[1] == direct[3]
    assert answers(pair.router.url) == direct


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Once", "stream_interval": 3}),
        ("/v1/completions", {"prompt": "Once", "return_token_ids": True, "stream_interval": 3}),
        ("/v1/completions", {"prompt": "Once", "logprobs": 1, "stream_interval": 3}),
        ("/v1/chat/completions", {**CHAT, "stream_interval": 3}),
        ("/v1/chat/completions", {**CHAT, "return_token_ids": True, "stream_interval": 3}),
        (
            "/v1/chat/completions",
            {**CHAT, "stream_interval": 3, "n": 2, "temperature": 1, "seed": 1},
        ),
    ],
)
def test_events_have_the_same_fields_as_directly(pair: Pair, path: str, body: dict) -> None:
    """The router asks for token ids of its own, and no client sees them."""

    def joined(url: str) -> tuple[set[str], list[object], dict]:
        options = {"stream_options": {"include_usage": True}}
        events = _stream(url, path, {"temperature": 0, "max_tokens": 12, **body, **options})
        names = {
            f"{kind}.{name}"
            for event in events
            for choice in event["choices"]
            for kind, holder in (("e", event), ("c", choice), ("d", choice.get("delta", {})))
            for name in holder
        }
        ids = [
            token
            for event in events
            for choice in event["choices"]
            for token in choice.get("token_ids") or ()
        ]
        return names, ids, (_text(events), events[-1]["usage"]["completion_tokens"])

    assert joined(pair.router.url) == joined(pair.servers[0].url)


def test_errors_of_instances_are_passed_on(pair: Pair) -> None:
    for body in (b'{"messages": 3}', b"{", b"[1]", b""):
        headers = {"Content-Type": "application/json"}
        direct, routed = (
            httpx.post(f"{url}/v1/chat/completions", content=body, headers=headers)
            for url in (pair.servers[0].url, pair.router.url)
        )
        assert routed.status_code == direct.status_code >= 400
        assert routed.json() == direct.json()


def test_a_session_id_means_nothing_to_an_instance(pair: Pair) -> None:
    body = {"prompt": "Once", "max_tokens": 2, "session_id": "user 1"}
    for process in (pair.servers[0], pair.router):
        answer = httpx.post(f"{process.url}/v1/completions", json=body)
        assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers


def test_request_id_is_kept(pair: Pair) -> None:
    answer = httpx.post(
        f"{pair.router.url}/v1/completions",
        json={"prompt": "Once", "max_tokens": 1},
        headers={"X-Request-Id": "mine"},
    )
    assert answer.headers["X-Request-Id"] == "mine"
    assert answer.json()["id"] == "cmpl-mine"


def test_metrics_have_a_label_for_each_instance(pair: Pair) -> None:
    httpx.post(f"{pair.router.url}/v1/completions", json={"prompt": "Once", "max_tokens": 1})
    text = httpx.get(f"{pair.router.url}/metrics").text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    names = {server.name for server in pair.servers}
    for name in (
        *("fastdeploy_router_instance_ready", "fastdeploy:num_requests_running"),
        "fastdeploy:time_to_first_token_seconds",
    ):
        assert {sample.labels["instance"] for sample in families[name].samples} == names, name
    assert families["fastdeploy:time_to_first_token_seconds"].type == "histogram"
    assert families["fastdeploy_router_requests"].type == "counter"


# ---------------------------------------------------------------- keys, limits, hostile clients


def _raw(url: str, data: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(data)
        return connection.recv(65536)


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"X-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        b"Bad Name: 1\r\n\r\n",
    ],
)
def test_ambiguous_requests_are_refused(pair: Pair, head: bytes) -> None:
    answer = _raw(pair.router.url, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head)
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), answer[:200]


def test_connection_headers_stay_on_their_connection(route) -> None:
    seen: list[bytes] = []
    with Stranger(_noting(seen)) as stranger:
        router = route([stranger.url]).until_ready(1)
        _raw(
            router.url,
            b"POST /v1/completions HTTP/1.1\r\nHost: evil\r\nConnection: keep-alive, X-Secret\r\n"
            b"X-Secret: 1\r\nTE: trailers\r\nProxy-Authorization: Basic x\r\nX-Kept: 2\r\n"
            b"Content-Length: 2\r\n\r\n{}",
        )
    (request,) = seen
    lines = request.lower().split(b"\r\n")
    assert b"x-kept: 2" in lines
    assert f"host: {stranger.url[7:]}".encode() in lines
    for name in (b"x-secret", b"te:", b"proxy-authorization", b"evil"):
        assert not any(line.startswith(name) or line.endswith(name) for line in lines), name


def test_keys_and_limits(pair: Pair, route) -> None:
    urls = [server.url for server in pair.servers]
    router = route(urls, "--api-key", "secret", "--max-body-mb", "0.01").until_ready(2)
    url, key = f"{router.url}/v1/completions", {"Authorization": "Bearer secret"}
    assert httpx.post(url, json={"prompt": "a"}).status_code == 401
    for wrong in ("Bearer secre", "Basic secret", "Bearer admin", "Bearer sécret".encode()):
        assert httpx.post(url, json={}, headers={"Authorization": wrong}).status_code == 401
    assert httpx.get(f"{router.url}/metrics").status_code == 401
    assert httpx.get(f"{router.url}/health").status_code == 200
    good = httpx.post(url, json={"prompt": "a", "max_tokens": 1}, headers=key)
    assert good.status_code == 200
    large = httpx.post(url, json={"prompt": "a" * 20_000}, headers=key)
    assert large.status_code == 413
    assert "10485 bytes" in large.json()["error"]["message"]
    deep = httpx.post(url, content=b"[" * 10_000, headers=key)
    assert deep.status_code == 400
    assert "nests too deeply" in deep.json()["error"]["message"]
    admin = f"{router.url}/admin/instances"
    assert httpx.get(admin, headers=key).status_code == 401  # a key of its own
    assert httpx.get(admin, headers=ADMIN).status_code == 200


def test_keys_of_clients_reach_the_instances(route) -> None:
    seen: list[bytes] = []
    with Stranger(_noting(seen)) as stranger:
        for options in ((), ("--instance-api-key", "inner")):
            router = route([stranger.url], *options).until_ready(1)
            headers = {"Authorization": "Bearer mine"}
            httpx.post(f"{router.url}/v1/completions", json={}, headers=headers)
    keys = [[line for line in r.split(b"\r\n") if b"Bearer" in line] for r in seen]
    assert keys == [[b"Authorization: Bearer mine"], [b"Authorization: Bearer inner"]]


# ---------------------------------------------------------------- instances that misbehave


def _answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 " + status + b"\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _noting(seen: list[bytes]):
    """Answers everything, and keeps what is no probe."""

    def reply(request: bytes) -> bytes:
        if request.startswith(b"POST"):
            seen.append(request)
        return _answer(b"{}")

    return reply


def _sse(*events: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return head + b"".join(events)


class Stranger:
    """An instance that answers probes, and anything else with what a function makes of the request:
    bytes, or an endless iterator of them."""

    def __init__(self, reply) -> None:
        self._reply = reply
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._ends = threading.Event()

    def __enter__(self) -> Stranger:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            request = connection.recv(65536)
            try:
                if request.startswith(b"GET /health"):
                    connection.sendall(_answer(b"{}"))
                elif request.startswith(b"GET /metrics"):
                    connection.sendall(_answer(b"\xff garbage\n# TYPE x\n{} 1\n"))
                else:
                    reply = self._reply(request)
                    for part in [reply] if isinstance(reply, bytes) else reply:
                        connection.sendall(part)
                        if self._ends.is_set():
                            return
            except OSError:
                pass


def _endless_headers(request: bytes):
    yield b"HTTP/1.1 200 OK\r\n"
    while True:
        yield b"X-More: " + b"a" * 1000 + b"\r\n"


def _endless_event(request: bytes):
    yield _sse(b"data: ")
    while True:
        yield b"a" * 65536


def _silence(request: bytes):
    time.sleep(30)
    return b""


LIES = {
    "garbage": lambda request: b"\x00\x01 lies\r\n\r\n" * 100,
    "endless headers": _endless_headers,
    "endless event": _endless_event,
    "silence": _silence,
    "hangs up": lambda request: b"",
    "short body": lambda request: _answer(b"{}").replace(b"Length: 2", b"Length: 20"),
    "own error": lambda request: _answer(b'{"error": {"message": "no"}}', b"503 No"),
    "stream of nonsense": lambda request: _sse(b"data: nonsense\n\n"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_instance_harms_nobody(pair: Pair, route, lie: str) -> None:
    """Every request is answered by the honest one; after some, the liar gets no more."""
    honest = pair.servers[0].url
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 8}
    expected = _text(_stream(honest, "/v1/completions", body))
    with Stranger(LIES[lie]) as liar:
        timeout = "2" if lie == "silence" else "20"
        options = ("--policy", "round-robin", "--answer-timeout", timeout)
        router = route([liar.url, honest], *options).until_ready(2)
        for _ in range(3):
            assert _text(_stream(router.url, "/v1/completions", body)) == expected
            whole = httpx.post(f"{router.url}/v1/completions", json=body, timeout=30)
            assert whole.json()["choices"][0]["text"] == expected
        name = liar.url.removeprefix("http://")
        if lie != "own error":  # which is a clear answer, and no failure
            assert router.metric("fastdeploy_router_failures_total", instance=name) >= 3
            assert router.listed("breaker")[name] in ("open", "half-open")
        assert router.metric("fastdeploy_router_failures_total", instance=honest[7:]) == 0


def test_stream_that_breaks_off_ends_with_an_error_where_it_cannot_go_on(pair, route) -> None:
    """This one has no token ids, so nobody can tell what comes next; nothing is shown twice."""
    piece = b'data: {"id": "x", "choices": [{"index": 0, "text": "Hello"}]}\n\n'
    with Stranger(lambda request: _sse(piece, b"data: {half an ev")) as liar:
        router = route([liar.url, pair.servers[0].url]).until_ready(2)
        router.admin(pair.servers[0].name, "drain")
        events = _stream(router.url, "/v1/completions", {"prompt": "Once"})
    assert _text(events[:-1]) == "Hello"
    assert events[-1]["error"]["code"] == 503
    assert "broke" in events[-1]["error"]["message"]


def test_no_instance_left(route) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    router = route([f"http://127.0.0.1:{port}"])
    answer = httpx.post(f"{router.url}/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert "1 broken" in answer.json()["error"]["message"]
    assert httpx.get(f"{router.url}/health").status_code == 503
    assert httpx.get(f"{router.url}/health/live").status_code == 200


# ---------------------------------------------------------------- drain, leave, die


def test_client_that_leaves_cancels_its_request(pair: Pair) -> None:
    running = "fastdeploy:num_requests_running"
    body = {"prompt": "Once", **LONG, "max_tokens": 7000, "stream": True}
    url = f"{pair.router.url}/v1/completions"
    with httpx.stream("POST", url, json=body) as response:
        lines = response.iter_lines()  # kept: its end would close the connection
        next(lines)
        wait_for(lambda: sum(pair.router.in_flight().values()) == 1, "the request to run")
    wait_for(lambda: sum(pair.router.in_flight().values()) == 0, "the request to be cancelled", 5)

    def idle() -> bool:
        texts = [httpx.get(f"{server.url}/metrics").text for server in pair.servers]
        return all(f'{running}{{model_name="ernie-tiny"}} 0.0' in text for text in texts)

    wait_for(idle, "the engines to be idle", 5)


def test_server_that_its_operator_drains_gets_nothing_new(
    pair: Pair, route: Callable[..., Router]
) -> None:
    drained = serve("--admin-key", "operator")
    try:
        router = route([drained.url, pair.servers[1].url], "--policy", "round-robin")
        router.until_ready(2)
        begun = [threading.Event() for _ in range(2)]
        body = {**CHAT, **LONG, "max_tokens": 400}
        with ThreadPoolExecutor(2) as threads:
            streams = [
                threads.submit(_stream, router.url, "/v1/chat/completions", body, one)
                for one in begun
            ]
            assert all(one.wait(30) for one in begun)
            assert set(router.in_flight().values()) == {1}
            operator = {"Authorization": "Bearer operator"}
            assert httpx.post(f"{drained.url}/drain", headers=operator).status_code == 200
            # At once, before a probe can have seen it: what is refused there goes elsewhere.
            whole = {**CHAT, "max_tokens": 4}
            for _ in range(6):
                answer = httpx.post(f"{router.url}/v1/chat/completions", json=whole, timeout=60)
                assert answer.status_code == 200
            wait_for(lambda: "draining" in router.listed("state")[drained.name], "the probe")
            for stream in streams:
                assert stream.result()[-1]["choices"][0]["finish_reason"] == "length"
        assert router.listed("breaker")[drained.name] == "closed"
        failures = router.metric("fastdeploy_router_failures_total", instance=drained.name)
        assert failures == router.metric("fastdeploy_router_migrations_total") == 0
    finally:
        assert drained.stop() == 0


def test_draining_instance_gets_nothing_new(pair: Pair) -> None:
    router, (one, other) = pair.router, pair.servers
    with ThreadPoolExecutor(2) as threads:
        router.admin(other.name, "drain")
        body = {"prompt": "Once", "temperature": 0, **LONG}
        long = threads.submit(_stream, router.url, "/v1/completions", body)
        wait_for(lambda: router.in_flight()[one.name] == 1, "the stream to run")
        router.admin(other.name, "resume")
        assert router.admin(one.name, "drain")["draining"]
        before = router.metric("fastdeploy_router_requests_total", instance=other.name)
        for _ in range(6):
            short = {"prompt": "Once", "max_tokens": 1}
            assert httpx.post(f"{router.url}/v1/completions", json=short).status_code == 200
        after = router.metric("fastdeploy_router_requests_total", instance=other.name)
        events = long.result(60)  # what ran there ends there
    router.admin(one.name, "resume")
    assert after == before + 6
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    missing = httpx.post(f"{router.url}/admin/instances/nobody/drain", headers=ADMIN)
    assert missing.status_code == 404
    assert one.name in missing.json()["error"]["message"]


def test_router_that_stops_lets_answers_end(pair: Pair, route) -> None:
    router = route([server.url for server in pair.servers]).until_ready(2)
    with ThreadPoolExecutor(1) as threads:
        body = {"prompt": "Once", "temperature": 0, **LONG}
        long = threads.submit(_stream, router.url, "/v1/completions", body)
        wait_for(lambda: sum(router.in_flight().values()) == 1, "the stream to run")
        router.signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{router.url}/health/ready").status_code == 503, "draining", 5)
        refused = httpx.post(f"{router.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "stopping" in refused.json()["error"]["message"]
        assert long.result(60)[-1]["choices"][0]["finish_reason"] == "length"
    assert router.process.wait(10) == 0


def test_hanging_instance(pair: Pair, stopped) -> None:
    """Its streams go on elsewhere, new requests never wait for it, and it comes back."""
    router, (one, other) = pair.router, pair.servers
    body = {"prompt": "Once", "temperature": 0, **LONG}
    expected = _text(_stream(other.url, "/v1/completions", body))
    with ThreadPoolExecutor(1) as threads:
        router.admin(other.name, "drain")
        stream = threads.submit(_stream, router.url, "/v1/completions", body)
        wait_for(lambda: router.in_flight()[one.name] == 1, "the stream to run")
        stopped(one)
        router.admin(other.name, "resume")
        assert _text(stream.result(60)) == expected
    short = {"prompt": "Once", "max_tokens": 1}
    began = time.monotonic()
    for _ in range(10):
        assert httpx.post(f"{router.url}/v1/completions", json=short).status_code == 200
    assert time.monotonic() - began < 5
    one.signal(signal.SIGCONT)
    router.until_ready(2)


def test_killed_instance(pair: Pair, stopped) -> None:
    """Under load: the other's streams do not notice, its own go on exactly or end with an error,
    and new requests are answered."""
    router, (one, other) = pair.router, pair.servers
    options = {**LONG, "stream_options": {"include_usage": True}}
    seeded = {"temperature": 0.8, "seed": 3, "min_tokens": 9}
    path = "/v1/completions"
    bodies = [
        (path, {"prompt": "Two", "temperature": 0, "return_token_ids": True, **options}),
        (path, {"prompt": "A cat", **seeded, **options}),
        ("/v1/chat/completions", {**CHAT, **seeded, **options}),
    ]
    fixed = {"prompt": "Two", "temperature": 0, "logprobs": 0, "ignore_eos": True}
    with ThreadPoolExecutor(8) as threads:
        expected = list(threads.map(lambda asked: _stream(other.url, *asked), bodies))
        begun: list[threading.Event] = []

        def start(path: str, body: dict):
            begun.append(threading.Event())
            return threads.submit(_stream, router.url, path, body, begun[-1])

        router.admin(one.name, "drain")
        unharmed = start(path, {**fixed, "max_tokens": 150})
        wait_for(lambda: router.in_flight()[other.name] == 1, "a stream at the other")
        router.admin(one.name, "resume")
        router.admin(other.name, "drain")
        cut = start(path, {**fixed, "max_tokens": 7000})
        # Its client is shown nothing before the end, so it is asked again from the beginning.
        whole_body = {"prompt": "A dog", "temperature": 0, "ignore_eos": True, "max_tokens": 2000}
        whole = threads.submit(httpx.post, router.url + path, json=whole_body, timeout=60)
        wait_for(lambda: router.in_flight()[one.name] == 2, "both requests")
        streams = [start(*asked) for asked in bodies]
        assert all(event.wait(30) for event in begun)
        stopped(one)  # so that what is counted is what is cut
        to_move = router.in_flight()[one.name] - 2
        retries = router.metric("fastdeploy_router_retries_total", instance=other.name)
        router.admin(other.name, "resume")
        one.signal(signal.SIGKILL)
        for _ in range(5):
            answer = httpx.post(router.url + path, json={"prompt": "Once", "max_tokens": 1})
            assert answer.status_code == 200
        for stream, asked, want in zip(streams, bodies, expected, strict=True):
            events = stream.result(60)
            assert _text(events) == _text(want), asked
            assert events[-1]["usage"] == {**events[-1]["usage"], **_counts(want)}
            assert events[-2]["choices"][0]["finish_reason"] == "length"
            assert len({event["id"] for event in events}) == 1
            assert _ids(events) == _ids(want)
        assert _text(unharmed.result(60)) == _text(expected[0])
        *shown, end = cut.result(60)
        assert end["error"]["code"] == 503
        assert _text(shown)[:50] == _text(expected[0])[: len(_text(shown))][:50] != ""
        again = httpx.post(other.url + path, json=whole_body, timeout=60).json()
        assert whole.result(60).json()["choices"] == again["choices"]
        assert whole.result().json()["usage"]["completion_tokens"] == 2000
    assert router.metric("fastdeploy_router_retries_total", instance=other.name) > retries
    moved = router.metric("fastdeploy_router_migrations_total", instance=other.name)
    assert moved >= to_move > 0
    port = int(one.url.rpartition(":")[2])
    one.stop()
    pair.servers[0] = serve("--port", str(port))
    router.until_ready(2)


def _counts(events: list[dict]) -> dict:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: events[-1]["usage"][name] for name in names}


def _ids(events: list[dict]) -> list[int]:
    return [
        token
        for event in events
        for choice in event["choices"]
        for token in choice.get("token_ids") or ()
    ]
