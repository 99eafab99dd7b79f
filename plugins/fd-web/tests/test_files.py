"""The files of the page: built from the sources that are here, open to all, closed to others."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import httpx
import pytest
from fd_web.api_page import api_page
from fd_web.routes import PAGE, TYPES

from tests.server_process import ServerProcess

UI = Path(__file__).parents[1] / "ui"


def test_the_page_is_built_from_these_sources() -> None:
    digests = runpy.run_path(str(UI / "write_digests.py"))["digests"]()
    assert digests == (UI / "page.sha256").read_text(), (
        "run: cd plugins/fd-web/ui && npm ci && npm run build && python3 write_digests.py"
    )


def test_the_page_names_files_of_its_own_alone() -> None:
    html = (PAGE / "index.html").read_text()
    names = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert names and all(name.startswith("ui/") for name in names)
    assert all((PAGE / name.removeprefix("ui/")).is_file() for name in names)
    assert "<style" not in html and not re.search(r"<script(?! [^>]*src=)", html)
    assert {path.suffix for path in PAGE.iterdir()} <= TYPES.keys()
    assert sum(path.stat().st_size for path in PAGE.iterdir()) < 300_000


def test_files_need_no_key_and_state_does(server: ServerProcess) -> None:
    page = httpx.get(server.url + "/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert httpx.head(server.url + "/").status_code == 200
    for path in PAGE.iterdir():
        answer = httpx.get(f"{server.url}/ui/{path.name}")
        assert answer.content == path.read_bytes()
        assert answer.headers["content-type"] == TYPES[path.suffix]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert httpx.get(server.url + "/state").status_code == 401
    state = httpx.get(server.url + "/state", headers={"authorization": "Bearer sesame"}).json()
    assert state["model"] == "tiny" and state["health"] == "ready"
    reasons = {found["choice"]: found["reason"] for found in state["decisions"]}
    assert reasons["device cpu"] == "asked for by name"


def test_docs_describe_every_route_and_field(server: ServerProcess) -> None:
    key = {"authorization": "Bearer sesame"}
    schema = httpx.get(server.url + "/openapi.json", headers=key).json()
    answer = httpx.get(server.url + "/docs")  # without a key
    assert (
        answer.status_code == 200
        and "default-src 'none'" in answer.headers["content-security-policy"]
    )
    page = answer.text
    assert "<script" not in page and "style=" not in page
    assert re.findall(r'(?:src|href)="([^"#]+)"', page) == [
        "ui/icon.svg",
        "ui/docs.css",
        "openapi.json",
    ]
    for path, methods in schema["paths"].items():
        for method in methods:
            assert f"<h2><code>{method.upper()} {path}</code></h2>" in page
    chat = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    section = page.partition("<h2><code>POST /v1/chat/completions</code></h2>")[2].partition(
        "</section>"
    )[0]
    assert re.findall(r"<tr><td>(\w+)</td>", section) == list(chat)


def test_what_a_description_says_is_text() -> None:
    evil = "<img src=x onerror=alert(1)>"
    field = {
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "description": evil,
    }
    body = {"content": {"application/json": {"schema": {"properties": {evil: field}}}}}
    route = {"operationId": evil, "description": evil, "requestBody": body}
    page = api_page({"info": {"version": evil}, "paths": {evil: {"post": route}}}).decode()
    assert evil not in page and "list of string" in page


@pytest.mark.parametrize(
    "path", ["/ui/", "/ui/nothing.js", "/ui/../routes.py", "/ui/..%2froutes.py", "/ui/%2e%2e/state"]
)
def test_nothing_else_is_open(server: ServerProcess, path: str) -> None:
    assert httpx.get(server.url + path).status_code in (401, 404)
