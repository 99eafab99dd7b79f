"""Kimi K2's tool calls: <|tool_call_begin|>functions.NAME:NUMBER, a separator, JSON, an end.

Form: https://huggingface.co/moonshotai/Kimi-K2-Instruct (docs/tool_call_guidance.md). The model's
own id of a call is kept, since its chat template shows ids in that form."""

from __future__ import annotations

from typing import ClassVar

from .calls import MAX_NAME_CHARS, ToolCallStream
from .scan import Steps


class KimiK2ToolParser(ToolCallStream):
    """The number counts the calls of a conversation; a name without prefix or number is taken."""

    start = "<|tool_call_begin|>"
    separator = "<|tool_call_argument_begin|>"
    end = "<|tool_call_end|>"
    starts = (start,)
    silent = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    markers: ClassVar[tuple[str, ...]] = (start, separator, end, *silent)

    def call(self, start: str) -> Steps[None]:
        reader = self.reader
        text, _ = yield from reader.until(self.separator, limit=MAX_NAME_CHARS)
        call_id = text.strip()
        name, _, number = call_id.removeprefix("functions.").rpartition(":")
        if not number.isdecimal():
            name, call_id = call_id.removeprefix("functions."), ""
        yield from reader.space()
        if not self.name(name) or (yield from reader.char()) != "{":
            self.refuse()
            return
        self.begin(name, call_id)
        if (yield from self.json_arguments(self.end)) is None:
            yield from self.tail(self.end)
