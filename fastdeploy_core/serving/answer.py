"""From the text of one answer to its parts: thinking, content, tool calls.

The same pieces go through the same parsers whether the answer is streamed or not; a whole answer is
the sum of its deltas, so the two cannot differ.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdeploy_core.contracts.small import (
    ParsedDelta,
    ReasoningParser,
    ToolCallDelta,
    ToolParser,
)


class AnswerParser:
    """Thinking is taken off first, tool calls are found in what is left."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, max_calls: int | None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._known: set[int] = set()

    def push(self, text: str) -> ParsedDelta:
        """New text of the answer."""
        if self._reasoning is None:
            return self._find_tools(ParsedDelta(content=text))
        return self._find_tools(self._reasoning.push(text))

    def finish(self) -> ParsedDelta:
        """The answer has ended: what was held back."""
        delta = ParsedDelta()
        if self._reasoning is not None:
            delta = self._find_tools(self._reasoning.finish())
        if self._tools is not None:
            rest = self._tools.finish()
            delta.content += rest.content
            delta.tool_calls.extend(self._checked(rest.tool_calls))
        return delta

    def _find_tools(self, delta: ParsedDelta) -> ParsedDelta:
        if self._tools is None or not delta.content:
            return delta
        found = self._tools.push(delta.content)
        return ParsedDelta(
            content=found.content,
            reasoning=delta.reasoning,
            tool_calls=self._checked(found.tool_calls),
        )

    def _checked(self, calls: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
        """Give each call an id when it begins; drop calls beyond the limit."""
        kept = []
        for call in calls:
            if self._max_calls is not None and call.index >= self._max_calls:
                continue
            if call.index not in self._known:
                self._known.add(call.index)
                call.id = call.id or f"call_{uuid.uuid4().hex[:24]}"
            kept.append(call)
        return kept


@dataclass(slots=True)
class ToolCall:
    """One call, as far as it is known."""

    id: str
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Collected:
    """Everything one choice has said so far."""

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

    def tool_calls(self) -> list[dict[str, Any]]:
        """OpenAI's form, in order."""
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for _, call in sorted(self.calls.items())
        ]


def tool_call_deltas(calls: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """OpenAI's form of parts of calls: id, type and name once, arguments in pieces."""
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
