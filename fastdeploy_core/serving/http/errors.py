"""What clients are told about errors: OpenAI error objects, without internals.

Every error goes through `to_api_error`, which removes paths, addresses and tracebacks from the
text.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from fastdeploy_core.errors import (
    Aborted,
    ConfigError,
    FastDeployError,
    InvalidRequest,
    PluginError,
    QueueFull,
    RequestError,
    RequestTimeout,
    Unavailable,
    WorkerError,
)

logger = logging.getLogger(__name__)

MAX_VALIDATION_ERRORS = 10
MAX_MESSAGE_CHARS = 2000
CLIENT_CLOSED_REQUEST = 499  # seen only in logs and metrics: the client has left
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
_INSIDES = (
    (re.compile(r"0x[0-9a-fA-F]{4,}"), "[address]"),
    (re.compile(r"(?<![\w.:/])/(?:[\w.+~-]+/)+[\w.+~-]*"), "[path]"),
    (re.compile(r"Traceback \(most recent call last\).*", re.DOTALL), ""),
    (re.compile(r'File "[^"]*", line \d+'), "[source]"),
)


class ApiError(Exception):
    """An answer with an error object and this HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        # what is wrong with a request may name paths: the client's own, or those of routes
        self.message = sanitise(message) if status >= 500 else printable(message)
        self.type = type or _TYPES.get(status) or _phrase(status)
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.status,
            }
        }

    def encoded(self, scope: Scope) -> bytes:
        """The error object as JSON, in the shape of the API that the call is for."""
        state = scope.get("state", {})
        if (shape := state.get("error_body")) is None:
            return msgspec.json.encode(self.body())
        request_id = state.get("request_id", "")
        return msgspec.json.encode(shape(self.status, self.message, self.param, request_id))


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def sanitise(message: str) -> str:
    """The message without file paths, memory addresses, tracebacks and control characters."""
    for pattern, replacement in _INSIDES:
        message = pattern.sub(replacement, message)
    return printable(message)


def printable(message: str) -> str:
    """The message without control characters, at most as long as a message may be."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else " " for c in message)
    return shown[:MAX_MESSAGE_CHARS].strip()


def retry_after(seconds: float) -> dict[str, str]:
    """The header that says when to come again, at least one second."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def too_busy(message: str, seconds: float = 1.0) -> ApiError:
    """429: a queue is full."""
    return ApiError(429, message, headers=retry_after(seconds))


def unavailable(message: str, seconds: float = 1.0) -> ApiError:
    """503: this server cannot answer now, another may."""
    return ApiError(503, message, headers=retry_after(seconds))


def to_api_error(error: BaseException) -> ApiError:
    """The answer for any exception. An internal error says nothing about its cause."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _from_validation(error.errors(include_url=False, include_input=False))
    if isinstance(error, HTTPException):
        return ApiError(
            error.status_code,
            str(error.detail or _phrase(error.status_code)),
            type=_TYPES.get(error.status_code, ""),
            headers=dict(error.headers or {}),
        )
    if isinstance(error, QueueFull):
        return too_busy(str(error), error.retry_after_s)
    if isinstance(error, RequestTimeout):
        if "deadline" in str(error):
            return ApiError(504, str(error))
        return unavailable(str(error))
    if isinstance(error, Aborted | ClientDisconnect):
        return ApiError(CLIENT_CLOSED_REQUEST, str(error) or "the client left", type="Aborted")
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, Unavailable):
        return unavailable(str(error), 5.0)
    if isinstance(error, WorkerError):
        logger.error("engine failed: %s", error)
        return unavailable("the engine failed while this request was running; try again", 5.0)
    if isinstance(error, RequestError) or type(error) is FastDeployError:
        return ApiError(500, str(error))  # only this request failed; the engine gives the reason
    if isinstance(error, FastDeployError):
        logger.error("request failed: %s", error)
        if isinstance(error, ConfigError | PluginError):  # of a plugin that a request was to use
            return ApiError(501, "this server is not set up for that; its log has the details")
    else:
        logger.error("request failed unexpectedly", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def _from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    lines, params = [], []
    for error in errors[:MAX_VALIDATION_ERRORS]:
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, InvalidRequest):  # its message names the field
            lines.append(str(cause)[:300])
            params.append(cause.param)
            continue
        field = _field(error["loc"])
        message = str(error["msg"]).removeprefix("Value error, ")
        lines.append(f"{field}: {message}"[:200] if field else message[:200])
        params.append(field or None)
    if len(errors) > MAX_VALIDATION_ERRORS:
        lines.append(f"and {len(errors) - MAX_VALIDATION_ERRORS} more")
    return ApiError(400, "; ".join(lines), param=params[0])


def _field(location: Sequence[Any]) -> str:
    """`messages.0.content` without the union branches pydantic puts in between."""
    parts = [str(p) for p in location if isinstance(p, int) or re.fullmatch(r"\w+", str(p))]
    branches = {"str", "int", "float", "bool", "list", "dict", "none"}
    return ".".join(p for p in parts if p not in branches)[:128]


async def send_error(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a raw ASGI request with an error and close its connection."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = error.encoded(scope)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **{name.lower(): value for name, value in error.headers.items()},
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
