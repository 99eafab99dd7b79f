"""Mistral's tool calls after [TOOL_CALLS], in the two forms of its tokenizers.

Up to v7:  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
From v11:  [TOOL_CALLS]NAME[ARGS]{...}, once for each call, perhaps with [CALL_ID]ID before [ARGS].

Forms: mistralai/mistral-common, tokens/tokenizers/instruct.py."""

from __future__ import annotations

import secrets
import string
from typing import ClassVar

from .calls import MAX_NAME_CHARS, REFUSED, ToolCallStream
from .scan import Steps

_LETTERS = string.ascii_letters + string.digits


class MistralToolParser(ToolCallStream):
    """Ids have nine letters or digits, which Mistral's chat templates insist on."""

    start = "[TOOL_CALLS]"
    ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
    starts = (start,)
    markers: ClassVar[tuple[str, ...]] = (start, ARGS, CALL_ID)

    def new_id(self) -> str:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def call(self, start: str) -> Steps[None]:
        reader = self.reader
        yield from reader.space()
        if (yield from reader.char()) == "[":
            if (yield from self.json_calls()) == REFUSED:
                self.refuse()
            return
        text, stop = yield from reader.until(self.ARGS, self.CALL_ID, "{", limit=MAX_NAME_CHARS)
        call_id = ""
        if stop == self.CALL_ID:
            call_id, stop = yield from reader.until(self.ARGS, "{", limit=MAX_NAME_CHARS)
        if stop == "{":
            reader.back(1)
        yield from reader.space()
        name = self.name(text.strip())
        if not name or (yield from reader.char()) != "{":
            self.refuse()
            return
        self.begin(name, call_id.strip())
        if (yield from self.json_arguments(self.start)) == self.start:
            reader.back(len(self.start))
