"""Finds tool calls of the form <call>{"name": ..., "arguments": {...}}</call> in the answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fastdeploy_core.contracts.small import ParsedDelta, ToolCallDelta

BEGIN, END = "<call>", "</call>"


class MyCallsParser:
    """One instance per answer. Text arrives in pieces of any size."""

    markers: ClassVar[tuple[str, ...]] = (BEGIN, END)

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._held = ""  # text that is not decided yet
        self._num_calls = 0

    def push(self, text: str) -> ParsedDelta:
        """Text up to a marker is content; a call is complete once its end has come."""
        self._held += text
        found = ParsedDelta()
        while True:
            before, begun, rest = self._held.partition(BEGIN)
            if not begun:
                keep = _begun_marker(before)
                found.content += before[: len(before) - keep]
                self._held = before[len(before) - keep :]
                return found
            inside, ended, after = rest.partition(END)
            if not ended:
                found.content, self._held = found.content + before, begun + rest
                return found
            found.content += before
            call = self._call(inside)
            if call is None:
                found.content += begun + inside + ended  # no call after all
            else:
                found.tool_calls.append(call)
            self._held = after

    def finish(self) -> ParsedDelta:
        """The text has ended: what is held back was no call."""
        held, self._held = self._held, ""
        return ParsedDelta(content=held)

    def _call(self, text: str) -> ToolCallDelta | None:
        try:
            call = json.loads(text)
            name, arguments = call.pop("name"), call.pop("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        if call or not isinstance(name, str) or not isinstance(arguments, dict):
            return None  # another key may be a misspelt one, whose value would be lost
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return ToolCallDelta(index, f"call_{uuid.uuid4().hex}", name, json.dumps(arguments))


def _begun_marker(text: str) -> int:
    """How many characters at the end may be the beginning of a marker."""
    lengths = range(min(len(BEGIN) - 1, len(text)), 0, -1)
    return next((n for n in lengths if BEGIN.startswith(text[len(text) - n :])), 0)
