"""Lists of JSON calls after a word: Granite 3, Phi-4 mini, Command and Hunyuan.

Granite:     <|tool_call|>[{"name": ..., "arguments": {...}}, ...]; 3.1 and later: <tool_call>[...].
Phi-4 mini:  functools[{"name": ..., "arguments": {...}}, ...], or between <|tool_call|> and
             <|/tool_call|>.
Command:     <|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}, ...]
             <|END_ACTION|>, from R7B on.
Hunyuan:     <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>.

Forms: the chat templates of ibm-granite/granite-3.3-8b-instruct,
microsoft/Phi-4-mini-instruct, CohereLabs/c4ai-command-a-03-2025 and tencent/Hunyuan-A13B-Instruct.
Granite 4 writes as Hermes does."""

from __future__ import annotations

from typing import ClassVar

from .calls import REFUSED, ToolCallStream
from .scan import Steps


class GraniteToolParser(ToolCallStream):
    """Nothing ends the list but its bracket; an end marker is skipped."""

    starts: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>")
    end = "</tool_call>"
    silent: ClassVar[tuple[str, ...]] = (end,)
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


class CommandToolParser(GraniteToolParser):
    """Ids count the calls of one answer, so that others are given in their place. An answer may
    stand between tokens of its own, which are not shown."""

    starts = ("<|START_ACTION|>",)
    end = "<|END_ACTION|>"
    silent = (end, "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    markers: ClassVar[tuple[str, ...]] = (*starts, end)
    name_key = "tool_name"
    other_keys = ("tool_call_id",)


class HunyuanToolParser(GraniteToolParser):
    """Granite's under other tags."""

    starts = ("<tool_calls>",)
    end = "</tool_calls>"
    silent = (end,)
    markers: ClassVar[tuple[str, ...]] = (*starts, end)
