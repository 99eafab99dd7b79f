"""gpt-oss: an answer of several messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>thinking<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
        <|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>

Analysis is thinking; final, and commentary without a recipient, are content; a message to a
function is a call. The prompt ends with <|start|>assistant, so an answer begins in a header.

Form: https://github.com/openai/harmony, docs/format.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from fastdeploy_core.contracts.small import ParsedDelta

from .calls import ToolCallStream
from .scan import Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
_ENDS = (END, RETURN, CALL)
_NEXT = (*_ENDS, START, CHANNEL)  # what ends a message; the next one may begin without an end
MAX_HEADER_CHARS = 512
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NO_TOOLS = ("assistant", "user", "all")


class HarmonyToolParser(ToolCallStream):
    """Reads all messages. Without a reasoning parser before it, it returns the thinking, too."""

    markers: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)

    def main(self) -> Steps[None]:
        reader, self._said = self.reader, set[Callable[[str], None]]()
        stop = yield from reader.word(" to=", "to=")  # a header that begins with its recipient
        reader.back(len(stop))
        while True:
            if not stop:
                stop = yield from reader.pass_until(self.show, START, CHANNEL, MESSAGE, *_ENDS)
                if not stop:
                    return
                reader.hold(len(stop))
                reader.back(len(stop))
            else:
                reader.hold()
            if stop in _ENDS:
                yield from reader.word(stop)
                reader.release()
            else:
                yield from self._message()
            stop = ""

    def _message(self) -> Steps[None]:
        """A message from its header on, which is text if it is none."""
        reader = self.reader
        start = yield from reader.word(START)
        header, stop = yield from reader.until(MESSAGE, START, *_ENDS, limit=MAX_HEADER_CHARS)
        if stop != MESSAGE:
            if stop:
                reader.back(len(stop))
            elif not start:
                yield from reader.word(CHANNEL)
            self.refuse()
            return
        reader.release()
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        is_thinking = channel is not None and channel.group(1) == "analysis"
        name = recipient.group(1) if recipient else ""
        if name in _NO_TOOLS or (is_thinking and not name.startswith("functions.")):
            name = ""
        name = self.name(name.removeprefix("functions."))
        if name:
            yield from self.tool_message(name, start + header + MESSAGE)
            return
        emit = self._new_message(self.think if is_thinking else self.show)
        stop = yield from reader.pass_until(emit, *_NEXT)
        if stop not in _ENDS:
            reader.back(len(stop))

    def tool_message(self, name: str, header: str) -> Steps[None]:
        """A message to a function."""
        reader = self.reader
        self.begin(name)
        yield from reader.space()
        stop = yield from reader.word(*_NEXT)
        if stop or not (yield from reader.char()):
            self.arguments("{}")
        elif (yield from reader.char()) == "{":
            ended = yield from self.json_arguments(*_NEXT)
            if ended is None:
                yield from reader.space()
                ended = yield from reader.pass_until(self.arguments, *_NEXT)
            stop = ended
        else:
            stop = yield from reader.pass_until(self.arguments, *_NEXT)
        if stop not in _ENDS:
            reader.back(len(stop))

    def think(self, text: str) -> None:
        """Thinking."""
        self._delta.reasoning += text

    def _new_message(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """A line break parts a message from an earlier one of the same kind."""
        is_first = True

        def emit(text: str) -> None:
            nonlocal is_first
            if is_first and say in self._said:
                text = "\n" + text
            is_first = False
            self._said.add(say)
            say(text)

        return emit


class HarmonyReasoningParser(HarmonyToolParser):
    """Takes the thinking out. A message to a function stays as it stands, for the tool parser."""

    def __init__(self, prompt_text: str, chat_template_kwargs: Mapping[str, Any]) -> None:
        super().__init__([])

    def show(self, text: str) -> None:
        self._delta.content += text

    def finish(self) -> ParsedDelta:
        self.reader.end()
        return self._step("")

    def tool_message(self, name: str, header: str) -> Steps[None]:
        self.show(header if header.startswith(START) else f"{START}assistant{header}")
        stop = yield from self.reader.pass_until(self.show, *_NEXT)
        if stop in _ENDS:
            self.show(stop)
        else:
            self.reader.back(len(stop))
