"""The answer of POST /v1/messages: a message, the events that lead to it, and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from fastdeploy_core.serving.http.errors import ApiError
from fastdeploy_core.serving.openai.chat import Piece
from fastdeploy_core.serving.openai.usage import Usage

from .blocks import Block, Step
from .messages_request import NAMES
from .tools import Tools

Event = dict[str, Any]

PING_S = 10.0  # between signs of life while nothing can be shown
# Thinking comes back in the next turn and is taken whatever its signature is.
_SIGNATURE = "unsigned"
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, message: str, param: str | None, request_id: str) -> dict[str, Any]:
    """An error as this API has it. It has no place for the field's name but the message."""
    if param and param not in message:
        message = f"{param}: {message}"
    other = "api_error" if status >= 500 else "invalid_request_error"
    return {
        "type": "error",
        "error": {"type": _ERROR_TYPES.get(status, other), "message": message},
        "request_id": request_id,
    }


class MessageWriter:
    """Shows one answer. `call_id`: the id of the HTTP call, `model`: the name that is answered,
    `max_tokens`: what the request allows."""

    names: Mapping[str, str] = NAMES

    def __init__(self, tools: Tools, call_id: str, model: str, max_tokens: int) -> None:
        self._tools = tools
        self._call_id = call_id
        self._max_tokens = max_tokens
        self._shown_at = time.monotonic()
        self.is_cut = False
        self._message: dict[str, Any] = {
            "id": f"msg_{call_id.removeprefix('msg_')}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, usage: Usage) -> Iterator[Event]:
        """The message without content."""
        message = {**self._message, "content": [], "usage": _usage(usage)}
        yield {"type": "message_start", "message": message}
        yield self._ping()

    def step(self, step: Step) -> Iterator[Event]:
        """A block of the answer is a content block."""
        what, block, text = step
        self._shown_at = time.monotonic()
        if what == "start":
            shown = self._shown(block, "")
            yield {"type": "content_block_start", "index": block.index, "content_block": shown}
        elif what == "more":
            yield _delta(block, _PIECES[block.kind], text)
        else:
            if block.kind == "thinking":
                yield _delta(block, "signature", _SIGNATURE)
            yield {"type": "content_block_stop", "index": block.index}
            shown = self._shown(block, block.text)
            if shown is not None:
                self._message["content"].append(shown)

    def idle(self) -> Iterator[Event]:
        """A sign of life, where a parser holds much back."""
        if time.monotonic() - self._shown_at > PING_S:
            yield self._ping()

    def end(self, last: Piece) -> Iterator[Event]:
        """Why it ended, and what it cost."""
        reason, sequence = "end_turn", None
        if self.is_cut:
            is_full = last.usage.num_completion_tokens >= self._max_tokens
            reason = "max_tokens" if is_full else "model_context_window_exceeded"
        elif last.finish_reason == "tool_calls":
            reason = "tool_use"
        elif isinstance(last.stop_reason, str):
            reason, sequence = "stop_sequence", last.stop_reason
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self._message.update(delta, usage=_usage(last.usage))
        yield {"type": "message_delta", "delta": delta, "usage": self._message["usage"]}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> Event:
        """The error alone."""
        return error_body(error.status, error.message, error.param, self._call_id)

    def whole(self) -> dict[str, Any]:
        """The message."""
        return self._message

    def _ping(self) -> Event:
        self._shown_at = time.monotonic()
        return {"type": "ping"}

    def _shown(self, block: Block, text: str) -> dict[str, Any] | None:
        """The content block; None for a call that cannot be made, because its end is missing."""
        if block.kind == "text":
            return {"type": "text", "text": text}
        if block.kind == "thinking":
            signature = _SIGNATURE if text else ""
            return {"type": "thinking", "thinking": text, "signature": signature}
        try:
            given = json.loads(text or "{}")
        except (ValueError, RecursionError):
            return None
        name = self._tools.given(block.name).name
        call_id = f"toolu_{block.call_id.removeprefix('call_')}"
        return {"type": "tool_use", "id": call_id, "name": name, "input": given}


_PIECES = {"text": "text", "thinking": "thinking", "call": "partial_json"}


def _delta(block: Block, field: str, text: str) -> Event:
    kind = "input_json_delta" if field == "partial_json" else f"{field}_delta"
    delta = {"type": kind, field: text}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _usage(usage: Usage) -> dict[str, Any]:
    """Prompt tokens that the cache held are not in input_tokens."""
    cached = usage.num_cached_tokens
    return {
        "input_tokens": usage.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.num_completion_tokens,
    }
