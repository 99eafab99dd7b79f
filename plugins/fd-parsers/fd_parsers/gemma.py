"""Gemma's tool calls: call:NAME{key:value,...} with strings between tokens of their own.

Gemma 4:        <|tool_call>call:NAME{key:<|"|>text<|"|>,count:3}<tool_call|>
FunctionGemma:  <start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>

Forms: https://ai.google.dev/gemma/docs (function calling of Gemma 4 and of FunctionGemma). Gemma 3
has no form of its own; its templates ask for that of other models."""

from __future__ import annotations

from typing import ClassVar

from .calls import MAX_NAME_CHARS, ToolCallStream
from .literals import JSON, Dialect, Literal
from .scan import Steps


class Gemma4ToolParser(ToolCallStream):
    """Keys have no quotes; a word that is no number or constant is a string."""

    start, end, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    starts = (start,)
    markers: ClassVar[tuple[str, ...]] = (start, end, quote)

    def call(self, start: str) -> Steps[None]:
        reader, name = self.reader, ""
        yield from reader.space()
        if (yield from reader.word("call:")):
            text, stop = yield from reader.until("{", limit=MAX_NAME_CHARS)
            reader.back(len(stop))
            name = self.name(text.strip()) if stop else ""
        if not name:
            self.refuse()
            return
        self.begin(name)
        dialect = Dialect((self.quote,), JSON.words, None, has_bare_words=True, is_lenient=True)
        reading = Literal(reader, self.arguments, dialect).object()
        if (yield from self.read_arguments(reading, self.end)) is None:
            yield from self.tail(self.end)


class FunctionGemmaToolParser(Gemma4ToolParser):
    """The same with other tokens."""

    start, end, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    starts = (start,)
    markers: ClassVar[tuple[str, ...]] = (start, end, quote)
