"""Keys, hosts, request ids: nothing but the probes answers without a key, whatever is asked how."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import fastapi
import httpx
import pytest

from fastdeploy_core.contracts.base import ApiRoutes
from fastdeploy_core.serving.http.middleware import OPEN_PATHS
from fastdeploy_core.serving.plugin_routes import PluginRoutes
from fastdeploy_core.tokenizer import Tokenizer
from tests.server_support import LiveServer, ScriptedEngine, live, raw_request

KEY = "sk-first-key"
OTHER = "sk-second-key"


def plugin_router() -> fastapi.APIRouter:
    router = fastapi.APIRouter()

    @router.get("/hello")
    async def hello() -> dict[str, str]:
        return {"hello": "plugin"}

    return router


@pytest.fixture
def guarded(engine: ScriptedEngine, tokenizer: Tokenizer) -> Iterator[LiveServer]:
    routes = PluginRoutes("fd-example", "/plugins/fd-example", ApiRoutes(plugin_router()))
    with live(engine, tokenizer, api_keys=(KEY, OTHER), plugins=[routes]) as server:
        yield server


def all_routes(server: LiveServer) -> list[tuple[str, str]]:
    """(method, path) of every route there is, found by introspection of the running app."""
    schema = server.app.openapi()
    documented = [(m.upper(), path) for path, entry in schema["paths"].items() for m in entry]
    return [*documented, ("GET", "/openapi.json"), ("GET", "/redoc")]


def filled(path: str) -> str:
    return path.replace("{model_id}", "tiny")


def test_introspection_sees_the_routes(guarded: LiveServer) -> None:
    paths = {path for _, path in all_routes(guarded)}
    assert {"/v1/chat/completions", "/metrics", "/plugins", "/plugins/fd-example/hello"} <= paths


def test_every_route_but_the_probes_needs_a_key(guarded: LiveServer) -> None:
    with httpx.Client(base_url=guarded.url) as client:
        for method, path in all_routes(guarded):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
                response = client.request(method, filled(path), headers=headers)
                if path in OPEN_PATHS:
                    assert response.status_code == 200
                    continue
                assert response.status_code == 401, (method, path)
                error = response.json()["error"]
                assert error["type"] == "AuthenticationError"
                assert error["code"] == 401
                assert KEY not in response.text
                assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/nope", "/plugins/nope", "/plugins/fd-example/nope", "/", "/v2/x"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_what_is_not_there_needs_a_key_too(guarded: LiveServer, method: str, path: str) -> None:
    """Without a key nobody learns which routes exist."""
    is_page = (method, path) == ("GET", "/")  # where fd-web has its files, which need no key
    with httpx.Client(base_url=guarded.url) as client:
        assert client.request(method, path).status_code == (404 if is_page else 401)
        headers = {"Authorization": f"Bearer {KEY}"}
        assert client.request(method, path, headers=headers).status_code == 404


def test_both_keys_open_every_route(guarded: LiveServer) -> None:
    with httpx.Client(base_url=guarded.url) as client:
        for method, path in all_routes(guarded):
            for key in (KEY, OTHER):
                headers = {"Authorization": f"Bearer {key}"}
                response = client.request(method, filled(path), headers=headers)
                assert response.status_code != 401, (method, path)
        hello = client.get("/plugins/fd-example/hello", headers=headers)
        assert hello.json() == {"hello": "plugin"}


@pytest.mark.parametrize(
    "line",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: a/health/live?x=",
        b"GET /v1/models HTTP/1.1\r\nHost: a#",
        b"GET /v1/models HTTP/1.1\r\nHost: a/?x=",
        b"GET /v1/models HTTP/1.0",
        b"get /v1/models HTTP/1.1\r\nHost: a",
        b"GET //v1/models HTTP/1.1\r\nHost: a",
        b"GET /health/live/../../v1/models HTTP/1.1\r\nHost: a",
        b"GET /health/live/%2e%2e/%2e%2e/v1/models HTTP/1.1\r\nHost: a",
        b"GET /health/live%2f..%2f..%2fv1/models HTTP/1.1\r\nHost: a",
        b"GET /%76%31/models HTTP/1.1\r\nHost: a",
        b"GET /v1/models?/health/live HTTP/1.1\r\nHost: a",
        b"GET /v1/models;/health/live HTTP/1.1\r\nHost: a",
        b"GET /v1/models/health/live HTTP/1.1\r\nHost: a",
        b"GET http://a/health/live/v1/models HTTP/1.1\r\nHost: a",
        b"GET http://a/v1/models HTTP/1.1\r\nHost: a",
        b"OPTIONS /v1/models HTTP/1.1\r\nHost: a",
        b"HEAD /v1/models HTTP/1.1\r\nHost: a",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nX-Forwarded-Prefix: /health/live",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Original-URL: /health/live",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Basic c2stZmlyc3Qta2V5",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-first-ke",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-first-key2",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\xfe",
    ],
)
def test_no_spelling_of_a_request_gets_past_the_key(guarded: LiveServer, line: bytes) -> None:
    status, body = raw_request(guarded.port, line + b"\r\nConnection: close")
    assert status in (400, 401, 404, 405), (status, body)
    assert b"max_model_len" not in body


def test_keys_are_shown_nowhere(guarded: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=guarded.url, headers=headers) as client:
        for path in ("/metrics", "/openapi.json", "/plugins", "/v1/models", "/version"):
            assert KEY not in client.get(path).text
    assert KEY not in repr(guarded.state.config)
    assert KEY not in caplog.text


def test_a_key_may_be_given_as_its_digest(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    with (
        live(engine, tokenizer, api_keys=(f"sha256:{digest}",)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        for key, status in ((KEY, 200), (OTHER, 401), (f"sha256:{digest}", 401), (digest, 401)):
            answer = client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status, key


def test_each_key_is_a_tenant_of_its_own(engine: ScriptedEngine, guarded: LiveServer) -> None:
    body = {"prompt": "x"}
    with httpx.Client(base_url=guarded.url) as client:
        for key in (KEY, OTHER, KEY):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    first, second, third = (request.tenant for request in engine.requests)
    assert first == third != second
    assert KEY not in first


def test_keys_share_no_cached_prefixes_unless_the_operator_says_so(
    engine: ScriptedEngine, tokenizer: Tokenizer, guarded: LiveServer
) -> None:
    def salts(server: LiveServer, **fields: str) -> list[str]:
        engine.requests.clear()
        with httpx.Client(base_url=server.url) as client:
            for key in (KEY, OTHER, KEY):
                headers = {"Authorization": f"Bearer {key}"}
                body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], **fields}
                for path in ("/v1/completions", "/v1/chat/completions"):
                    assert client.post(path, json=body, headers=headers).status_code == 200
        return [request.cache_salt for request in engine.requests]

    for fields in ({}, {"cache_salt": "mine"}):
        own = salts(guarded, **fields)
        assert own[0] == own[1] == own[4] == own[5] != own[2] == own[3]
        assert "" not in own
    with live(engine, tokenizer, api_keys=(KEY, OTHER), share_prefix_cache=True) as sharing:
        assert set(salts(sharing)) == {""}
        assert set(salts(sharing, cache_salt="mine")) == {"mine"}


def test_only_allowed_hosts_are_answered(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    hosts = ("good.test", "127.0.0.1")
    with (
        live(engine, tokenizer, allowed_hosts=hosts) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert client.get("/version").status_code == 200
        for host, status in [("good.test", 200), ("good.test:99", 200), ("evil.test", 400)]:
            assert client.get("/version", headers={"Host": host}).status_code == status


def test_browsers_may_call_from_allowed_origins_only(
    engine: ScriptedEngine, tokenizer: Tokenizer, client: httpx.Client
) -> None:
    ask = {
        "Origin": "https://ui.test",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    assert "access-control-allow-origin" not in client.get("/version", headers=ask).headers
    options = {"allowed_origins": ("https://ui.test",), "api_keys": (KEY,)}
    with (
        live(engine, tokenizer, **options) as server,
        httpx.Client(base_url=server.url) as other,
    ):
        preflight = other.options("/v1/chat/completions", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://ui.test"
        assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
        assert other.get("/v1/models", headers=ask).status_code == 401
        evil = other.options("/v1/models", headers={**ask, "Origin": "https://evil.test"})
        assert "access-control-allow-origin" not in evil.headers


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("abc-1.2_3", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("a%0d%0aINFO fake", False),
        ("é", False),
        ("", False),
    ],
)
def test_request_ids_are_echoed_when_harmless(
    client: httpx.Client, given: str, echoed: bool
) -> None:
    headers = {"X-Request-Id": given.encode("utf-8")}
    answer = client.get("/version", headers=headers).headers["x-request-id"]
    assert (answer == given) is echoed
    if not echoed:
        assert len(answer) == 32


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_one_id_leads_from_the_header_to_the_answer_and_the_log(
    engine: ScriptedEngine, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    with (
        live(engine, tokenizer, log_requests=True) as server,
        httpx.Client(base_url=server.url) as client,
        caplog.at_level("INFO"),
    ):
        for headers, fields in (
            ({}, {}),
            ({"X-Request-Id": "same"}, {}),
            ({"X-Request-Id": "same"}, {}),
            ({"X-Request-Id": "other"}, {"request_id": "from-the-body"}),
        ):
            caplog.clear()
            answer = client.post(path, json={**body, **fields}, headers=headers)
            shown = answer.headers["x-request-id"]
            expected = fields.get("request_id", headers.get("X-Request-Id", shown))
            assert shown == expected
            assert answer.json()["id"].partition("-")[2] == shown
            assert engine.requests[-1].request_id.startswith(f"{shown}-")
            assert f"request {engine.requests[-1].request_id}:" in caplog.text
    assert len({request.request_id for request in engine.requests}) == 4, "ids must be unique"
