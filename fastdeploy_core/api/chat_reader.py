"""Applies reasoning and tool parsers to the outputs of LLM.chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdeploy_core.contracts.small import ParsedDelta, ReasoningParser, ToolParser
from fastdeploy_core.parsers.answer import (
    AnswerReader,
    Thinking,
    joined,
    parser_named,
    shown_tokens,
    thinking_ahead,
)
from fastdeploy_core.types import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True)
class ChatParsers:
    """The parser classes an LLM was made with."""

    reasoning: type[ReasoningParser] | None
    tool: type[ToolParser] | None

    @classmethod
    def named(cls, reasoning: str | None, tool: str | None) -> ChatParsers | None:
        """Look parsers up by name; None when no name is given."""
        if not reasoning and not tool:
            return None
        return cls(parser_named("reasoning_parser", reasoning), parser_named("tool_parser", tool))


class ChatReader:
    """Reads the answers of one call of chat."""

    def __init__(
        self,
        parsers: ChatParsers,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> None:
        self._parsers = parsers
        self._tools = tools
        self._kwargs = chat_template_kwargs
        self._readers: dict[tuple[str, int], AnswerReader] = {}
        # Without tools in the request, no text is a tool call.
        self._tool_parser = parsers.tool if tools else None
        self.visible_tokens = shown_tokens(parsers.reasoning, self._tool_parser)

    def thinking_ahead(self, prompt_text: str) -> Thinking | None:
        """Whether the answer to this prompt may begin with thinking."""
        return thinking_ahead(self._parsers.reasoning, prompt_text, self._kwargs)

    def read(self, output: RequestOutput) -> RequestOutput:
        """The output with thinking and tool calls taken out of its texts."""
        output.outputs = [self._read(output, each) for each in output.outputs]
        return output

    def _read(self, output: RequestOutput, answer: CompletionOutput) -> CompletionOutput:
        key = (output.request_id, answer.index)
        reader = self._readers.get(key)
        if reader is None:
            reader = self._readers[key] = AnswerReader(
                self._parsers.reasoning,
                self._tool_parser,
                prompt_text=output.prompt or "",
                chat_template_kwargs=self._kwargs,
                tools=self._tools,
            )
        parts = [reader.push(answer.text)]
        if answer.finished:
            parts.append(reader.finish())
            del self._readers[key]
        return replace(
            answer,
            text="".join(part.content for part in parts),
            reasoning_content="".join(part.reasoning for part in parts) or None,
            tool_calls=_tool_calls(parts) or None,
        )


def _tool_calls(parts: Sequence[ParsedDelta]) -> list[dict[str, Any]]:
    """In OpenAI's form: id, type and name once, arguments in pieces."""
    shown = []
    for call in joined([call for part in parts for call in part.tool_calls]):
        function = {} if call.name is None else {"name": call.name}
        head = {} if call.id is None else {"id": call.id, "type": "function"}
        function["arguments"] = call.arguments
        shown.append({"index": call.index, **head, "function": function})
    return shown
