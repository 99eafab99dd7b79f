"""One answer from raw text to what an API shows: thinking first, tool calls in what follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastdeploy_core.contracts.small import ParsedDelta, ReasoningParser

ReasoningDriver = Callable[[str, Mapping[str, Any]], ReasoningParser]


@dataclass(frozen=True, slots=True)
class Thinking:
    """How the thinking of an answer that is about to begin shows in its text."""

    end: str
    begin: str | None = None  # None: the text begins in the thinking; else it may begin so


class TextParser(Protocol):
    """What splits text into parts: an AnswerReader, or a scanner of forced tool calls."""

    def push(self, text: str) -> ParsedDelta:
        """New text."""
        ...

    def finish(self) -> ParsedDelta:
        """The text has ended."""
        ...


def thinking_ahead(
    parser: ReasoningDriver | None,
    prompt_text: str,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Thinking | None:
    """Whether an answer to this prompt may begin with thinking. Parsers say so by an attribute
    `thinking`; one that has none never delays a grammar."""
    if parser is None:
        return None
    reader = parser(prompt_text, dict(chat_template_kwargs or {}))
    return getattr(reader, "thinking", None)


class AnswerReader:
    """Chains a reasoning parser and a tool parser; either may be missing."""

    def __init__(
        self,
        reasoning: ReasoningDriver | None,
        tool: Callable[[list[Any]], TextParser] | None,
        *,
        prompt_text: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        kwargs = dict(chat_template_kwargs or {})
        self._reasoning = reasoning(prompt_text, kwargs) if reasoning else None
        self._tool = tool(list(tools or [])) if tool else None
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
