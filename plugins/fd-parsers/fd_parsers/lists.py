"""Lists of JSON calls after a word: Granite 3 and Phi-4 mini.

Granite:     <|tool_call|>[{"name": ..., "arguments": {...}}, ...]; 3.1 and later: <tool_call>[...].
Phi-4 mini:  functools[{"name": ..., "arguments": {...}}, ...], or between <|tool_call|> and
             <|/tool_call|>.

Forms: the chat templates of ibm-granite/granite-3.3-8b-instruct and
microsoft/Phi-4-mini-instruct. Granite 4 writes as Hermes does."""

from __future__ import annotations

from typing import ClassVar

from .calls import REFUSED, ToolCallStream
from .scan import Steps


class GraniteToolParser(ToolCallStream):
    """Nothing ends the list but its bracket; an end marker is skipped."""

    starts = ("<|tool_call|>", "<tool_call>")
    end = "</tool_call>"
    silent = (end,)
    markers: ClassVar[tuple[str, ...]] = (*starts, end)

    def call(self, start: str) -> Steps[None]:
        if (yield from self.json_calls(self.end)) == REFUSED:
            self.refuse()


class Phi4MiniToolParser(GraniteToolParser):
    """The word functools alone is a word; only a bracket makes it a call."""

    starts = ("functools", "<|tool_call|>")
    end = "<|/tool_call|>"
    silent = (end,)
    markers: ClassVar[tuple[str, ...]] = ("<|tool_call|>", end)
