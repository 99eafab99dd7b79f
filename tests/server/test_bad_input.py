"""Malformed bodies: each gets a 4xx with an OpenAI error object, and the next request works."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator

import httpx
import pytest

from fastdeploy_core.tokenizer import Tokenizer
from tests.server_support import LiveServer, ScriptedEngine, live, raw_request

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "Hi"}]}
INSIDES = re.compile(
    r'Traceback|File "|0x[0-9a-f]{6,}|/home|/dev/shm|/usr/lib|site-packages|\.py\b'
)

MESSAGE = b'{"messages":[{"role":"user","content":"x"}]'
MALFORMED = {
    "empty": b"",
    "white space": b"   ",
    "no json": b"hello",
    "truncated object": MESSAGE,
    "truncated string": b'{"messages":"abc',
    "trailing comma": MESSAGE + b",}",
    "two documents": MESSAGE + b"}{}",
    "single quotes": b"{'messages':[]}",
    "comment": MESSAGE + b"} // hi",
    "array": b"[1,2]",
    "string": b'"x"',
    "number": b"3",
    "null": b"null",
    "not utf-8": b'{"messages":"\xff\xfe"}',
    "utf-16": (MESSAGE + b"}").decode().encode("utf-16"),
    "raw control character": b'{"messages":"a\x01b"}',
    "raw newline in a string": b'{"messages":"a\nb"}',
    "bad escape": b'{"messages":"\\q"}',
    "NaN": MESSAGE + b',"temperature":NaN}',
    "Infinity": MESSAGE + b',"temperature":Infinity}',
    "minus Infinity": MESSAGE + b',"top_p":-Infinity}',
    "overflowing float": MESSAGE + b',"temperature":1e999}',
    "huge integer": MESSAGE + b',"n":' + b"9" * 4000 + b"}",
    "integer beyond 64 bit": MESSAGE + b',"seed":9223372036854775808}',
    "hexadecimal number": MESSAGE + b',"n":0x10}',
    "leading zero": MESSAGE + b',"n":01}',
    "bool for an integer": MESSAGE + b',"n":true}',
    "bool for a number": MESSAGE + b',"temperature":false}',
    "string for an integer": MESSAGE + b',"n":"3"}',
    "fraction for an integer": MESSAGE + b',"n":3.5}',
    "string for a bool": MESSAGE + b',"stream":"yes"}',
    "number for a bool": MESSAGE + b',"stream":1}',
    "list for a string": MESSAGE + b',"model":["a"]}',
    "duplicate key": MESSAGE + b',"n":1,"n":2}',
    "lone surrogate": b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    "reversed surrogates": b'{"messages":[{"role":"user","content":"\\udc00\\ud800"}]}',
    "surrogate in a key": MESSAGE + b',"\\ud800":1}',
    "NUL": b'{"messages":[{"role":"user","content":"a\\u0000b"}]}',
    "NUL in an id": MESSAGE + b',"user":"\\u0000"}',
    "deep nesting": b'{"messages":' + b"[" * 100_000,
    "deep but closed": b'{"metadata":' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}",
    "no messages": b"{}",
    "messages null": b'{"messages":null}',
    "messages a string": b'{"messages":"Hi"}',
    "messages empty": b'{"messages":[]}',
    "message no object": b'{"messages":["Hi"]}',
    "mixed messages": b'{"messages":[1,{"role":"user","content":"x"}]}',
    "unknown role": b'{"messages":[{"role":"robot","content":"x"}]}',
    "role missing": b'{"messages":[{"content":"x"}]}',
    "content missing": b'{"messages":[{"role":"user"}]}',
    "content a number": b'{"messages":[{"role":"user","content":5}]}',
    "too many messages": b'{"messages":[' + b'{"role":"user","content":"x"},' * 2048
    + b'{"role":"user","content":"x"}]}',
    "long model name": MESSAGE + b',"model":"' + b"m" * 300 + b'"}',
    "negative stop token": MESSAGE + b',"stop_token_ids":[-1]}',
    "stop token beyond 2^31": MESSAGE + b',"stop_token_ids":[2147483648]}',
    "empty stop": MESSAGE + b',"stop":[""]}',
    "logit bias no number": MESSAGE + b',"logit_bias":{"a":1}}',
    "too much logit bias": MESSAGE
    + b',"logit_bias":{' + b",".join(b'"%d":1' % i for i in range(301)) + b"}}",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """One server for the whole file: it must survive all of this."""
    with live(ScriptedEngine(tokenizer, lambda prompt, index: "fine"), tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bodies_are_the_clients_errors(client: httpx.Client, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = client.post(CHAT, content=MALFORMED[name], headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == 400
    assert error["message"]
    assert not INSIDES.search(response.text)
    assert client.post(CHAT, json=GOOD).status_code == 200


@pytest.mark.parametrize("route", ["/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", ["NaN", "lone surrogate", "deep nesting", "array", "huge integer"])
def test_every_route_with_a_body_is_as_strict(client: httpx.Client, route: str, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = client.post(route, content=MALFORMED[name], headers=headers)
    assert response.status_code == 400, response.text


def test_only_json_is_taken(client: httpx.Client) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"Content-Type": content_type}
        response = client.post(CHAT, content=b"{}", headers=headers)
        assert response.status_code == 415
        assert response.json()["error"]["code"] == 415
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    response = client.post("/v1/completions", content=gzip.compress(b"{}"), headers=packed)
    assert response.status_code == 415 and "compressed" in response.json()["error"]["message"]
    charset = {"Content-Type": "application/json; charset=utf-8"}
    body = MESSAGE + b"}"
    assert client.post(CHAT, content=body, headers=charset).status_code == 200


def test_unknown_paths_and_methods_have_error_objects_too(client: httpx.Client) -> None:
    for response, status in [
        (client.get("/nope"), 404),
        (client.get("/v1/models/nope"), 404),
        (client.get(CHAT), 405),
        (client.delete("/v1/models"), 405),
    ]:
        assert response.status_code == status
        assert response.json()["error"]["code"] == status
        assert response.json()["error"]["type"]
        assert response.headers["content-type"] == "application/json"


def test_a_body_over_the_limit_is_refused_declared_or_not(
    server: LiveServer, client: httpx.Client
) -> None:
    limit = server.state.config.max_body_bytes
    big = b"x" * (limit + 1)
    headers = {"Content-Type": "application/json"}
    assert client.post(CHAT, content=big, headers=headers).status_code == 413
    chunks = (big[i : i + 65536] for i in range(0, len(big), 65536))
    try:
        response = client.post(CHAT, content=chunks, headers=headers)
    except (httpx.WriteError, httpx.RemoteProtocolError):
        pass  # the server closed while we were still sending, which is right, too
    else:
        assert response.status_code == 413
    assert client.post(CHAT, json=GOOD).status_code == 200


def test_request_heads_are_bounded(server: LiveServer, client: httpx.Client) -> None:
    head = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    status, _ = raw_request(server.port, head + b"X-A: " + b"a" * 300_000)
    assert status in (0, 400, 431)
    status, _ = raw_request(server.port, head + b"\r\n".join(b"X-%d: 1" % i for i in range(101)))
    assert status == 431
    assert client.get("/version").status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz",
        b"GET /version HTTP/1.1",
        b"nonsense",
    ],
)
def test_malformed_http_is_refused(server: LiveServer, client: httpx.Client, head: bytes) -> None:
    status, _ = raw_request(server.port, head)
    assert status in (0, 400)
    assert client.get("/version").status_code == 200


def test_tokenize_and_detokenize_are_inverse(client: httpx.Client) -> None:
    text = "Hellö, wörld 中"
    body = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert body["count"] == len(body["tokens"]) == len(text.encode())
    assert body["max_model_len"] == 512
    assert body["token_strs"][0] == "H"
    back = client.post("/detokenize", json={"tokens": body["tokens"]}).json()
    assert back == {"prompt": text}
    chat = client.post("/tokenize", json={"messages": GOOD["messages"]}).json()
    text = client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<|user|>Hi<|assistant|>"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "abc"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**6]}),
    ],
)
def test_tokenizer_routes_check_what_they_get(client: httpx.Client, route: str, body: dict) -> None:
    assert client.post(route, json=body).status_code == 400
