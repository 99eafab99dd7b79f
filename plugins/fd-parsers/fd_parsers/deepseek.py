"""DeepSeek's tool calls between special tokens, in the two forms its releases use.

V3, R1:  begin "function" sep NAME, a line break, a ```json block with the arguments, end.
V3.1:    begin NAME sep ARGUMENTS end.

Forms: the chat templates of deepseek-ai/DeepSeek-V3-0324 and deepseek-ai/DeepSeek-V3.1. V3.2 writes
tags: see tags.py.
"""

from __future__ import annotations

from typing import ClassVar

from .calls import MAX_NAME_CHARS, ToolCallStream
from .scan import Steps

_SPACE = "\u2581"  # DeepSeek's markers use full-width bars, and this character for a space


def _marker(words: str) -> str:
    return f"<\uff5c{words.replace(' ', _SPACE)}\uff5c>"


SEPARATOR = _marker("tool sep")
FENCE = "```"


class DeepSeekToolParser(ToolCallStream):
    """Parser for both forms; the text after the separator tells which one it is."""

    start = _marker("tool call begin")
    end = _marker("tool call end")
    starts = (start,)
    silent = (_marker("tool calls begin"), _marker("tool calls end"))
    markers: ClassVar[tuple[str, ...]] = (start, end, SEPARATOR, *silent)

    def call(self, start: str) -> Steps[None]:
        reader = self.reader
        before, _ = yield from reader.until(SEPARATOR, limit=MAX_NAME_CHARS)
        name = self.name(before.strip())
        yield from reader.space()
        if name == "function" and (yield from reader.char()) != "{":
            line, _ = yield from reader.until(FENCE, limit=MAX_NAME_CHARS)
            name = self.name(line.strip())
            yield from reader.word("json")
            yield from reader.space()
        opening = (yield from reader.char()) or self.end
        if name and opening == "{":
            self.begin(name)
            if (yield from self.json_arguments(self.end)) is None:
                yield from self.tail(self.end)
        elif name and (yield from reader.word(self.end)):
            self.begin(name)
            self.arguments("{}")
        else:
            self.refuse()
