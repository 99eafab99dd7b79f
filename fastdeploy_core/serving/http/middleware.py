"""The middleware that every byte passes: request ids, Host, keys, body limits, and an answer for
every failure.

Plain ASGI, outermost first: Guard (ids, last-resort errors, access log) -> Hosts -> Keys -> Bodies.
Decisions look at `scope` only, never at a URL rebuilt from headers.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, send_error, to_api_error
from .protocol import connection_of

logger = logging.getLogger(__name__)

# Probes of orchestrators, which send no key; the answers say nothing but up or down.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
DRAIN_PATH = "/drain"
# Only the operator's own key opens these, if there is one.
ADMIN_PATHS = {
    *(DRAIN_PATH, "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/v1/pause"),
    *("/resume", "/v1/resume", "/sleep", "/v1/sleep", "/wake_up", "/v1/wakeup"),
    *("/update_weights", "/v1/update_weights", "/reset_prefix_cache"),
}
_PAGE = re.compile(r"/|/docs|/ui/[\w.-]+", re.ASCII)  # fd-web's files, the same for everybody
MAX_HEADERS = 100  # the HTTP parser bounds their bytes
_CLIENT_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)

IGNORED_HEADER = b"x-ignored-fields"
MAX_NAMES_SHOWN = 16
_FIELD_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def shown_id(given: bytes, own: str) -> str:
    """The id of a call: the client's, if it fits into a header, else the server's."""
    text = given.decode("latin-1")
    return text if _CLIENT_ID.fullmatch(text) else own


Observer = Callable[[str, int, float], None]  # path template, status, seconds


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def route_path(scope: Scope) -> str:
    """The path as routes know it, without the server's --root-path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _name_list(names: Sequence[str]) -> bytes:
    """Names of fields that a client sent, as far as they fit into a header."""
    shown = [n if _FIELD_NAME.fullmatch(n) else "?" for n in names[:MAX_NAMES_SHOWN]]
    return ", ".join(shown).encode("ascii")


class Guard:
    """Gives each request an id, echoes the client's, and answers what nothing else caught."""

    def __init__(
        self, app: ASGIApp, observe: Observer | None = None, shapes: Mapping[str, Any] | None = None
    ) -> None:
        self.app = app
        self.observe = observe
        self.shapes = shapes or {}  # of errors, by path; other paths have OpenAI's

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            else:
                await send_error(ApiError(403, "no such protocol here"), scope, receive, send)
            return
        started_at = time.monotonic()
        status = 0
        given = _header(scope, b"x-request-id") or b""
        scope.setdefault("state", {})["request_id"] = shown_id(given, secrets.token_hex(16))
        scope["state"]["error_body"] = self.shapes.get(route_path(scope))
        if scope["method"] == "HEAD":  # of what GET answers, uvicorn sends the head
            scope = {**scope, "method": "GET"}

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", scope["state"]["request_id"].encode("ascii")),
                ]
                if scope["state"]["error_body"]:  # of Anthropic's clients
                    message["headers"].append((b"request-id", message["headers"][-1][1]))
                if ignored := scope["state"].get("ignored_fields"):
                    message["headers"].append((IGNORED_HEADER, _name_list(ignored)))
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            if status:  # the answer has begun, so the connection can only be closed
                logger.error("answer broke off", exc_info=error)
                raise
            await send_error(to_api_error(error), scope, receive, send_with_id)
        finally:
            if self.observe is not None:
                route = scope.get("route")
                path = getattr(route, "path", "unmatched")
                self.observe(path, status, time.monotonic() - started_at)


class Hosts:
    """Answers only requests whose Host header is on the allow-list, against DNS rebinding."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self.app = app
        self.allowed = frozenset(host.lower() for host in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and self.allowed:
            host = (_header(scope, b"host") or b"").decode("latin-1").lower()
            name = host if host.endswith("]") else host.rsplit(":", 1)[0]
            if host not in self.allowed and name not in self.allowed:
                await send_error(ApiError(400, "unknown Host header"), scope, receive, send)
                return
        await self.app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    path, is_read = route_path(scope), scope["method"] in ("GET", "HEAD")
    return path in OPEN_PATHS or (is_read and _PAGE.fullmatch(path) is not None)


class Keys:
    """A key on every path but OPEN_PATHS, independent of the routes that exist: as Bearer or, as
    Anthropic's clients send it, in x-api-key. Clients' keys do not open what is the operator's, nor
    the other way round."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], admin_key: str) -> None:
        self.app = app
        self.digests = [_digest(key) for key in keys]
        self.admin = [_digest(admin_key)] if admin_key else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        known = self.digests
        if scope["type"] == "http" and self.admin and route_path(scope) in ADMIN_PATHS:
            known = self.admin
        if scope["type"] != "http" or not known or _is_open(scope):
            await self.app(scope, receive, send)
            return
        found = _match(_header(scope, b"authorization"), known)
        plain = _header(scope, b"x-api-key") or _header(scope, b"api-key")  # of Azure's clients
        if found is None and plain is not None:
            found = _match(b"bearer " + plain, known)
        if found is None:
            error = ApiError(
                401,
                "a valid key is needed: send it as Authorization: Bearer KEY or X-Api-Key: KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await send_error(error, scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = found.hex()[:16]
        await self.app(scope, receive, send)


def _match(header: bytes | None, known: Sequence[bytes]) -> bytes | None:
    """The digest of the key that was sent, if it is known; always compares with all of them."""
    scheme, _, key = (header or b"").partition(b" ")
    digest = hashlib.sha256(key.strip()).digest()
    matched = [hmac.compare_digest(digest, one) for one in known]
    return digest if any(matched) and scheme.lower() == b"bearer" else None


def _digest(key: str) -> bytes:
    """SHA-256 of a key, which may be given as sha256:HEX so that it is kept nowhere."""
    kind, _, digest = key.partition(":")
    return bytes.fromhex(digest) if kind == "sha256" else hashlib.sha256(key.encode()).digest()


class Bodies:
    """Bounds a request while it arrives: headers, body bytes, and time."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if len(scope["headers"]) > MAX_HEADERS:
            error = ApiError(431, f"a request may have at most {MAX_HEADERS} headers")
            await send_error(error, scope, receive, send)
            return
        declared = _header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared[:20]) > self.max_bytes:
            await send_error(self._too_large(), scope, receive, send)
            return
        connection = connection_of(scope)
        deadline = time.monotonic() + self.timeout_s
        received, complete = 0, False

        async def counted() -> Message:
            nonlocal received, complete
            # The whole body is here, so no timer is needed; the next message is http.disconnect,
            # which may take long.
            if complete or (connection is not None and not connection.more_body):
                message = await receive()
            else:
                message = await self._in_time(receive, deadline)
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if received > self.max_bytes:
                    raise self._too_large()
            return message

        await self.app(scope, counted, send)

    async def _in_time(self, receive: Receive, deadline: float) -> Message:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await receive()
        except TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time") from error

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self.max_bytes} bytes", headers={"Connection": "close"}
        )
