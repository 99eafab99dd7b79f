"""A small HTTP client for `chat` and `complete`: JSON, server-sent events, errors of one line."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from fastdeploy_core.errors import ConfigError, FastDeployError

DEFAULT_URL = "http://127.0.0.1:8180/v1"
CONNECT_TIMEOUT_S = 10.0


class ServerError(FastDeployError):
    """The server answered with an error, or not at all."""


class Client:
    """One server. Each call is its own connection."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r} is not an http address such as {DEFAULT_URL}")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        base = parts.path.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._timeout_s = timeout_s
        key = api_key or os.environ.get("OPENAI_API_KEY") or ""
        self._headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str) -> Any:
        """The JSON of a GET."""
        with self._open("GET", path, None) as response:
            return json.loads(response.read())

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of a POST."""
        with self._open("POST", path, body) as response:
            return json.loads(response.read())

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed POST; an error event is raised."""
        with self._open("POST", path, {**body, "stream": True}) as response:
            for raw in response:
                line = raw.decode("utf-8").rstrip("\r\n")
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ServerError(_message(event, 500))
                yield event

    def model(self) -> str:
        """The first model the server has."""
        models = self.get("/models").get("data") or []
        if not models:
            raise ServerError("the server lists no model; name one with --model-name")
        return str(models[0]["id"])

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        raw = None if body is None else json.dumps(body).encode()
        with contextlib.closing(connection):
            try:
                connection.connect()
                connection.sock.settimeout(self._timeout_s)
                connection.request(method, self._base + path, raw, self._headers)
                response = connection.getresponse()
            except OSError as error:
                where = f"{self._host}:{self._port or ''}"
                raise ServerError(
                    f"no server answers at {where} ({error}); start one with "
                    "`fastdeploy serve MODEL` or give its address with --url"
                ) from error
            with response:
                if response.status >= 400:
                    raise ServerError(_message(response.read(), response.status))
                yield response


def _message(body: bytes | dict[str, Any], status: int) -> str:
    """The server's own words."""
    try:
        content = json.loads(body) if isinstance(body, bytes) else body
        return f"the server refused ({status}): {content['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}"
