"""Llama's tool calls, as JSON and as Python calls; Python calls of LFM2 and OLMo 3.

JSON:    {"name": ..., "parameters": {...}}, several divided by semicolons, at the beginning of an
         answer or after <|python_tag|>: Llama 3.1 to 3.3.
Python:  [name(key=value, ...), ...] at the beginning of an answer, or between <|python_start|> and
         <|python_end|>: Llama 3.2, Llama 4. Between <|tool_call_start|> and <|tool_call_end|>:
         LFM2. Without brackets, each on its line, between <function_calls> and </function_calls>:
         OLMo 3.

Forms: https://github.com/meta-llama/llama-models, models/llama3_3/prompt_format.md and
models/llama4/prompt_format.md; the chat templates of LiquidAI/LFM2-1.2B and
allenai/Olmo-3-7B-Instruct. Where no marker tells a call from an answer of the same form, only
functions of the request are called."""

from __future__ import annotations

import re
from typing import ClassVar

from .calls import MAX_NAME_CHARS, LeadingCallStream, ToolCallStream
from .literals import PYTHON, Literal, Malformed
from .scan import Steps

_WORD = re.compile(r"[\w.\-]+")


class Llama3JsonToolParser(LeadingCallStream):
    """Arguments are called parameters, sometimes arguments."""

    opening = "{"
    start = "<|python_tag|>"
    starts = (start,)
    markers: ClassVar[tuple[str, ...]] = (start,)

    def call(self, start: str) -> Steps[None]:
        while (yield from self.json_call()) is None:
            self.reader.hold()
            yield from self.reader.space()
            yield from self.reader.word(";")
            yield from self.reader.space()
            if (yield from self.reader.char()) != "{":
                break
        self.refuse()


class PythonCalls(ToolCallStream):
    """Reads calls with keyword arguments; what calls positionally is text."""

    end: ClassVar[str]  # where a malformed call ends

    def one(self) -> Steps[bool]:
        """One call; False if there is none."""
        reader = self.reader
        name = self.name((yield from reader.run(_WORD, MAX_NAME_CHARS)))
        reader.take(len(name))
        if not name or not (yield from reader.word("(")):
            return False
        yield from reader.space()
        first = yield from reader.run(_WORD, MAX_NAME_CHARS)
        reader.take(len(first))
        yield from reader.space()
        if not (yield from reader.word("=" if first else ")")):
            return False
        self.begin(name)
        if first:
            yield from self.read_arguments(self._keywords(first), self.end)
        else:
            self.arguments("{}")
        return True

    def _keywords(self, name: str) -> Steps[None]:
        """Keyword arguments after the first one's equals sign, up to the closing bracket."""
        reader, literal = self.reader, Literal(self.reader, self.arguments, PYTHON)
        self.arguments("{")
        while True:
            self.arguments(f'"{name}": ')
            yield from literal.value(1)
            yield from reader.space()
            if not (yield from reader.word(",")):
                break
            yield from reader.space()
            name = yield from reader.run(_WORD, MAX_NAME_CHARS)
            if not name:
                break  # a comma before the bracket
            reader.take(len(name))
            self.arguments(", ")
            yield from reader.space()
            if not (yield from reader.word("=")):
                self.arguments(name)
                raise Malformed
        if not (yield from reader.word(")")):
            raise Malformed
        self.arguments("}")


class PythonicToolParser(PythonCalls, LeadingCallStream):
    """A list of calls."""

    opening = "["
    start, end = "<|python_start|>", "<|python_end|>"
    starts: ClassVar[tuple[str, ...]] = (start,)
    silent: ClassVar[tuple[str, ...]] = (end,)
    markers: ClassVar[tuple[str, ...]] = (start, end)

    def call(self, start: str) -> Steps[None]:
        reader = self.reader
        yield from reader.space()
        is_good = bool((yield from reader.word("[")))
        while is_good:
            yield from reader.space()
            is_good = yield from self.one()
            yield from reader.space()
            if not is_good or not (yield from reader.word(",")):
                break
            reader.hold()
        if not is_good:
            self.refuse()
        elif (yield from reader.word("]")):
            reader.release()


class Lfm2ToolParser(PythonicToolParser):
    """The same between tokens of its own."""

    start, end = "<|tool_call_start|>", "<|tool_call_end|>"
    starts: ClassVar[tuple[str, ...]] = (start,)
    silent: ClassVar[tuple[str, ...]] = (end,)
    markers: ClassVar[tuple[str, ...]] = (start, end)


class Olmo3ToolParser(PythonCalls):
    """Calls on lines of their own."""

    start, end = "<function_calls>", "</function_calls>"
    starts: ClassVar[tuple[str, ...]] = (start,)
    silent: ClassVar[tuple[str, ...]] = (end,)
    markers: ClassVar[tuple[str, ...]] = (start, end)

    def call(self, start: str) -> Steps[None]:
        yield from self.reader.space()
        while (yield from self.one()):
            self.reader.hold()
            yield from self.reader.space()
        self.refuse()
