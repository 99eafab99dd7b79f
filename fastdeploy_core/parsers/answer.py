"""From an answer's raw text to the parts that an API shows: thinking first, then tool calls in the
rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fastdeploy_core import plugins
from fastdeploy_core.contracts.small import ParsedDelta, ReasoningParser, ToolCallDelta
from fastdeploy_core.plugins.discovery import OK, discover

ReasoningDriver = Callable[[str, Mapping[str, Any]], ReasoningParser]


class Thinking(Protocol):
    """How thinking shows in the text of an answer that is about to begin; a parser's `thinking`."""

    @property
    def end(self) -> str:
        """The token that ends it."""

    @property
    def begin(self) -> str | None:
        """The token that begins it; None: the text begins in the thinking."""


class TextParser(Protocol):
    """Splits text into parts: an AnswerReader, or a scanner of forced tool calls."""

    def push(self, text: str) -> ParsedDelta:
        """Add text; returns the parts that are certain."""

    def finish(self) -> ParsedDelta:
        """The text has ended; returns what was held back."""


NO_PARSER = "none"  # said by an operator who wants none


def parser_for(kind: str, name: str, model_type: str) -> str:
    """The name of the parser that serves: what the operator said, else the one that is named as the
    model's type in config.json. Empty: none. Reads names alone and imports no parser."""
    if name:
        return "" if name == NO_PARSER else name
    entries = discover().named(kind, model_type)
    return model_type if any(entry.status == OK for entry in entries) else ""


def parser_named(kind: str, name: str | None) -> Any:
    """The class of a parser by its name; None without one."""
    return plugins.lookup(kind, name) if name and name != NO_PARSER else None


def thinking_ahead(
    parser: ReasoningDriver | None,
    prompt_text: str,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Thinking | None:
    """How an answer to this prompt may begin with thinking, or None."""
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

    def push(self, text: str) -> ParsedDelta:
        """Add newly generated text."""
        delta = self._reasoning.push(text) if self._reasoning else ParsedDelta(content=text)
        return self._look_for_tools(delta)

    def finish(self) -> ParsedDelta:
        """The text has ended: release what the parsers held back."""
        delta = self._reasoning.finish() if self._reasoning else ParsedDelta()
        delta = self._look_for_tools(delta)
        if self._tool:
            rest = self._tool.finish()
            delta.content += rest.content
            delta.reasoning += rest.reasoning
            delta.tool_calls = joined([*delta.tool_calls, *rest.tool_calls])
        return delta

    def _look_for_tools(self, delta: ParsedDelta) -> ParsedDelta:
        if self._tool is None or not delta.content:
            return delta
        found = self._tool.push(delta.content)
        # A format of messages may hold thinking that no reasoning parser has taken out.
        thinking = delta.reasoning + found.reasoning
        return ParsedDelta(found.content, thinking, [*delta.tool_calls, *found.tool_calls])


def joined(calls: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """The calls with the pieces of each put together."""
    found: dict[int, ToolCallDelta] = {}
    for piece in calls:
        call = found.setdefault(piece.index, ToolCallDelta(piece.index))
        call.id, call.name = call.id or piece.id, call.name or piece.name
        call.arguments += piece.arguments
    return list(found.values())


def shown_tokens(*parsers: type[Any] | None) -> tuple[str, ...]:
    """Special tokens that these parsers read, so the detokenizer must show them."""
    return tuple(token for parser in parsers for token in getattr(parser, "markers", ()))
