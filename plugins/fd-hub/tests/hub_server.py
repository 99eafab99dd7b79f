"""A small hub on this machine: the routes that the three hubs' own libraries ask for a model.

It serves one repository, counts what is asked, and can break off, lie and refuse.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BRANCHES = ("main", "master", "v1", COMMIT)


@dataclass
class Repository:
    """What the hub has, and how it misbehaves."""

    model: str
    files: dict[str, bytes]
    commit: str = COMMIT
    break_after: int = -1  # bytes of the weights after which connections end; -1: never
    stall_after: int = -1  # bytes of the weights after which nothing more comes; -1: never
    fail_files: int = 0  # answer requests for files with it
    stalled: threading.Event = field(default_factory=threading.Event)
    lies: bool = False  # it sends other weights than it lists, of the same size
    status: int = 0  # answer everything with it
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repository: Repository

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        repo, parts = self.repository, urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        repo.asked.append((self.command, path, self.headers.get("Range", "")))
        if repo.status:
            return self._json({"error": "refused"}, repo.status)
        for route in (self._huggingface, self._modelscope, self._aistudio):
            if route(path, query):
                return None
        return self._json({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _huggingface(self, path: str, query: dict[str, list[str]]) -> bool:
        repo = self.repository
        api = f"/api/models/{repo.model}"
        words = path.removeprefix(api).strip("/").split("/")
        if path.startswith(api):
            revision = words[1] if len(words) > 1 else "main"
            if revision not in (*BRANCHES, repo.commit):
                self._json({"error": "no"}, 404, {"X-Error-Code": "RevisionNotFound"})
            elif words[0] == "tree":
                self._json([_tree_row(n, c) for n, c in repo.files.items()])
            else:
                siblings = [_sibling(n, c) for n, c in repo.files.items()]
                self._json({"id": repo.model, "sha": repo.commit, "siblings": siblings})
            return True
        start = f"/{repo.model}/resolve/"
        name = path.removeprefix(start).partition("/")[2]
        if path.startswith(start) and name in repo.files:
            content = repo.files[name]
            etag = _sha256(content) if _is_large(name) else _git(content)
            self._file(name, {"ETag": f'"{etag}"', "X-Repo-Commit": repo.commit})
            return True
        return False

    def _modelscope(self, path: str, query: dict[str, list[str]]) -> bool:
        repo = self.repository
        api = f"/api/v1/models/{repo.model}"
        if not path.startswith(api):
            return False
        if query.get("Revision", ["master"])[0] not in BRANCHES:
            self._json({"Code": 404, "Message": "no such revision"}, 404)
        elif path == f"{api}/repo/files":
            rows = [
                {"Path": n, "Name": n, "Size": len(c), "Sha256": _sha256(c), "Type": "blob"}
                for n, c in repo.files.items()
            ]
            self._json({"Code": 200, "Success": True, "Data": {"Files": rows}})
        elif path == f"{api}/repo":
            self._file(query["FilePath"][0], {})
        else:
            self._json({"Code": 200, "Success": True, "Data": {}})
        return True

    def _aistudio(self, path: str, query: dict[str, list[str]]) -> bool:
        repo = self.repository
        api = f"/api/v1/repos/{repo.model}/"
        what, _, rest = path.removeprefix(api).partition("/")
        if not path.startswith(api) or what == "tags":
            return False
        if what == "git" and rest.removeprefix("trees/") in BRANCHES:
            tree = [{"path": n, "type": "blob", "sha": _git(c)} for n, c in repo.files.items()]
            self._json({"url": f"http://x/{repo.commit}", "tree": tree, "total_count": len(tree)})
        elif what == "contents" and rest in repo.files:
            content = repo.files[rest]
            row = {"path": rest, "size": len(content), "last_commit_sha": repo.commit}
            self._json({**row, "Sha256": _sha256(content), "sha": _git(content)})
        elif what == "media" and rest in repo.files:
            self._file(rest, {})
        else:
            return False
        return True

    def _file(self, name: str, headers: dict[str, str]) -> None:
        repo, content = self.repository, self.repository.files[name]
        if repo.fail_files:
            return self._json({"error": "busy"}, repo.fail_files)
        if repo.lies and _is_large(name):
            content = content[:-1] + bytes([content[-1] ^ 1])
        start, end = 0, len(content)
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or end) + 1, end)
        part = content[start:end]
        self.send_response(206 if asked else 200)
        for key, value in {**headers, "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(part)))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return None
        if _is_large(name) and 0 <= repo.stall_after < len(part):
            self.wfile.write(part[: repo.stall_after])
            self.wfile.flush()
            repo.stalled.set()
            self.connection.recv(1)  # until the client is gone
            self.close_connection = True
            return None
        if _is_large(name) and 0 <= repo.break_after < len(part):
            self.wfile.write(part[: repo.break_after])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        self.wfile.write(part)
        return None

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for key, text in {**(headers or {}), "Content-Type": "application/json"}.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _is_large(name: str) -> bool:
    return name.endswith(".safetensors")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _large(content: bytes) -> dict[str, Any]:
    return {"sha256": _sha256(content), "oid": _sha256(content), "size": len(content)}


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": _git(content)}
    return {**row, "lfs": {**_large(content), "pointerSize": 1}} if _is_large(name) else row


def _tree_row(name: str, content: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
    row["oid"] = _git(content)
    return {**row, "lfs": {**_large(content), "pointerSize": 1}} if _is_large(name) else row


@contextmanager
def running(repository: Repository) -> Iterator[str]:
    """The hub's URL."""
    handler = type("Handler", (_Handler,), {"repository": repository})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
