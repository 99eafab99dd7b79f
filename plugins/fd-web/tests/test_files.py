"""The files of the page: built from the sources that are here, open to all, closed to others."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import httpx
import pytest
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
    assert names and all(name.startswith("/ui/") for name in names)
    assert all((PAGE / name.removeprefix("/ui/")).is_file() for name in names)
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


@pytest.mark.parametrize(
    "path", ["/ui/", "/ui/nothing.js", "/ui/../routes.py", "/ui/..%2froutes.py", "/ui/%2e%2e/state"]
)
def test_nothing_else_is_open(server: ServerProcess, path: str) -> None:
    assert httpx.get(server.url + path).status_code in (401, 404)
