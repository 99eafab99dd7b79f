"""Splits the text of an answer into thinking, content and tool calls.

Streamed and whole answers go through the same parsers piece by piece. A whole answer is the sum of
its deltas, so the two cannot differ.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdeploy_core.contracts.small import ParsedDelta, ToolCallDelta
from fastdeploy_core.parsers.answer import TextParser, joined


class Answer:
    """One choice: takes its text, returns its parts, and keeps them if wanted."""

    def __init__(self, parser: TextParser, max_calls: int | None = None) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._known: set[int] = set()
        self.collected = Collected()
        self.num_reasoning_tokens = 0

    def push(self, text: str, num_tokens: int, finished: bool) -> ParsedDelta:
        """Add text; with `finished` the result includes everything that the parser held back."""
        delta = self._parser.push(text) if text else ParsedDelta()
        # A token counts as thinking if its delta contains thinking only; exact enough for usage.
        if delta.reasoning and not delta.content:
            self.num_reasoning_tokens += num_tokens
        if finished:
            rest = self._parser.finish()
            delta = ParsedDelta(
                delta.content + rest.content,
                delta.reasoning + rest.reasoning,
                [*delta.tool_calls, *rest.tool_calls],
            )
        delta.tool_calls = self._checked(delta.tool_calls)
        self.collected.add(delta)
        return delta

    def finish_reason(self, engine_reason: str | None) -> str | None:
        """OpenAI's finish reason: `tool_calls` for an answer that stopped after calling tools."""
        if engine_reason == "stop" and self.collected.calls:
            return "tool_calls"
        return engine_reason

    def _checked(self, calls: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
        """Give each call an id when it begins; drop calls above the limit."""
        kept = []
        for call in joined(calls):
            if self._max_calls is not None and call.index >= self._max_calls:
                continue
            if call.index not in self._known:
                self._known.add(call.index)
                call.id = call.id or f"call_{uuid.uuid4().hex[:24]}"
            kept.append(call)
        return kept


@dataclass(slots=True)
class ToolCall:
    """One tool call, as far as it is known."""

    id: str
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Collected:
    """Everything in one choice so far."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)

    def add(self, delta: ParsedDelta) -> None:
        """Append what is new."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        for part in delta.tool_calls:
            call = self.calls.setdefault(part.index, ToolCall(id=part.id or ""))
            call.name += part.name or ""
            call.arguments += part.arguments

    def unfinished_calls_to_text(self) -> None:
        """Calls whose arguments were cut off are text: nobody can make them."""
        for index, call in list(self.calls.items()):
            if not _is_json(call.arguments):
                self.content += f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}'
                del self.calls[index]

    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's form, in order."""
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for _, call in sorted(self.calls.items())
        ]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def tool_call_deltas(calls: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """OpenAI's form of partial calls: id, type and name once, arguments in pieces."""
    shown = []
    for call in calls:
        function: dict[str, Any] = {"arguments": call.arguments}
        entry: dict[str, Any] = {"index": call.index, "function": function}
        if call.name is not None:
            function["name"] = call.name
        if call.id is not None:
            entry.update(id=call.id, type="function")
        shown.append(entry)
    return shown
