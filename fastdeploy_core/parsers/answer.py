"""One answer from raw text to what an API shows: thinking first, tool calls in what follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy_core.contracts.small import ParsedDelta, ReasoningParser, ToolParser


class AnswerReader:
    """Chains a reasoning parser and a tool parser; either may be missing."""

    def __init__(
        self,
        reasoning: type[ReasoningParser] | None,
        tool: type[ToolParser] | None,
        *,
        prompt_text: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        kwargs = dict(chat_template_kwargs or {})
        self._reasoning = reasoning(prompt_text, kwargs) if reasoning else None  # type: ignore[call-arg]
        self._tool = tool(list(tools or [])) if tool else None  # type: ignore[call-arg]
        self.num_tool_calls = 0

    def push(self, text: str) -> ParsedDelta:
        """Newly generated text."""
        delta = self._reasoning.push(text) if self._reasoning else ParsedDelta(content=text)
        return self._count(self._look_for_tools(delta))

    def finish(self) -> ParsedDelta:
        """The text has ended: what was held back, and whatever that releases."""
        delta = self._reasoning.finish() if self._reasoning else ParsedDelta()
        delta = self._look_for_tools(delta)
        if self._tool:
            rest = self._tool.finish()
            delta.content += rest.content
            delta.tool_calls += rest.tool_calls
        return self._count(delta)

    def _look_for_tools(self, delta: ParsedDelta) -> ParsedDelta:
        if self._tool is None or not delta.content:
            return delta
        found = self._tool.push(delta.content)
        return ParsedDelta(found.content, delta.reasoning, [*delta.tool_calls, *found.tool_calls])

    def _count(self, delta: ParsedDelta) -> ParsedDelta:
        for call in delta.tool_calls:
            self.num_tool_calls = max(self.num_tool_calls, call.index + 1)
        return delta


def shown_tokens(*parsers: type[Any] | None) -> tuple[str, ...]:
    """Special tokens that these parsers look for, so that the detokenizer must not hide them."""
    return tuple(token for parser in parsers for token in getattr(parser, "markers", ()))
