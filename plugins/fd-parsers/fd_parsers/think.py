"""Thinking between <think> and </think>, in the variants of several model families.

The variants differ in who writes <think> (the prompt or the model) and in what wraps the answer.
Line breaks around the tags belong to the tags and appear in neither part.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from fastdeploy_core.contracts.small import ParsedDelta

from .scan import MarkerScanner, chunks, merge

THINK, END_THINK = "<think>", "</think>"
RESPONSE, END_RESPONSE = "<response>", "</response>"
_SWITCHES = ("enable_thinking", "thinking")


class Thinking(NamedTuple):
    """How thinking will show in the text of an answer; see ReasoningParser."""

    end: str
    begin: str | None = None


class _Where(enum.Enum):
    START = "nothing but white space so far"
    THINKING = "in the thinking"
    ANSWER = "in the answer"


class _Trimmer:
    """Drops line breaks at the beginning and, unless more text follows, at the end."""

    __slots__ = ("_begun", "_breaks")

    def __init__(self, begun: bool = False) -> None:
        self._begun = begun
        self._breaks = 0

    def push(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip("\n")
            if not text:
                return ""
            self._begun = True
        body = text.rstrip("\n")
        trailing = len(text) - len(body)
        if not body:
            self._breaks += trailing
            return ""
        released = "\n" * self._breaks + body
        self._breaks = trailing
        return released

    @property
    def begun(self) -> bool:
        """Whether anything but line breaks has arrived."""
        return self._begun

    def rest(self) -> str:
        """Line breaks that were held back."""
        breaks, self._breaks = self._breaks, 0
        return "\n" * breaks


class ThinkParser:
    """The model writes <think> itself, or the prompt ends with it (Qwen3, ERNIE VL). Subclasses set
    how else an answer begins and what wraps it."""

    begin: ClassVar[str] = THINK
    end: ClassVar[str] = END_THINK
    markers: ClassVar[tuple[str, ...]] = (THINK, END_THINK)
    wrappers: ClassVar[tuple[str, ...]] = ()
    # Whether an answer begins in the thinking if the prompt does not say so.
    begins_thinking: ClassVar[bool] = False

    def __init__(self, prompt_text: str, chat_template_kwargs: Mapping[str, Any]) -> None:
        self._scanner = MarkerScanner((self.begin, self.end, *self.wrappers))
        self._where = self._first_place(prompt_text or "", chat_template_kwargs)
        self._space = ""  # leading white space, which may precede <think>
        self._thinking = _Trimmer()
        # Text of an answer without thinking is passed on unchanged.
        self._answer: _Trimmer | None = None
        self._passes_all = self._where is _Where.ANSWER

    @property
    def thinking(self) -> Thinking | None:
        """What a grammar has to wait for; asked before any text has arrived."""
        if self._where is _Where.ANSWER or not self.markers:  # a grammar waits for tokens
            return None
        if self._where is _Where.THINKING or self.begins_thinking:
            return Thinking(self.end)
        return Thinking(self.end, self.markers[0])

    def push(self, text: str) -> ParsedDelta:
        """Add newly generated text; ambiguous text is held back."""
        if self._passes_all:
            return ParsedDelta(content=text)
        return merge([self._push(chunk) for chunk in chunks(text)])

    def _push(self, text: str) -> ParsedDelta:
        delta = ParsedDelta()
        for is_marker, piece in self._scanner.push(text):
            if is_marker and self._marker(piece, delta):
                continue
            self._text(piece, delta)
        return delta

    def finish(self) -> ParsedDelta:
        """The text has ended: release what was held back."""
        delta = ParsedDelta()
        if self._passes_all:
            return delta
        held = self._scanner.finish()
        if held:
            self._text(held, delta)
        if self._where is _Where.START:
            delta.content += self._space
        elif self._where is _Where.ANSWER:
            delta.content += self._last_breaks()
        return delta

    def _last_breaks(self) -> str:
        return self._answer.rest() if self._answer else ""

    def _first_place(self, prompt_text: str, kwargs: Mapping[str, Any]) -> _Where:
        if any(kwargs.get(name) is False for name in _SWITCHES):
            return _Where.ANSWER
        tail = prompt_text[-64:].rstrip()
        if tail.endswith(self.begin):
            return _Where.THINKING
        if tail.endswith(self.end):
            return _Where.ANSWER
        return _Where.START

    def _marker(self, marker: str, delta: ParsedDelta) -> bool:
        """Whether the marker acts as a marker here and is not just text."""
        if marker == self.begin and self._where is _Where.START:
            self._where = _Where.THINKING
            return True
        if marker == self.begin and self._where is _Where.THINKING and not self._thinking.begun:
            return True  # the prompt ends with the marker and the model repeats it
        if marker == self.end and self._where in (_Where.THINKING, _Where.START):
            if self._where is _Where.START and not self.begins_thinking:
                return False
            self._end_thinking()
            return True
        return False

    def _end_thinking(self) -> None:
        self._where, self._answer, self._space = _Where.ANSWER, _Trimmer(), ""

    def _text(self, text: str, delta: ParsedDelta) -> None:
        if self._where is _Where.START:
            if not text.strip() and len(self._space) + len(text) <= 64:
                self._space += text
                return
            text, self._space = self._space + text, ""
            if self.begins_thinking:
                self._where = _Where.THINKING
            else:
                self._where, self._answer = _Where.ANSWER, _Trimmer(begun=True)
        if self._where is _Where.THINKING:
            delta.reasoning += self._thinking.push(text)
        elif self._answer is not None:
            delta.content += self._answer.push(text)


class DeepSeekR1Parser(ThinkParser):
    """The model thinks unless the prompt closes the thinking; older checkpoints omit <think>, and
    for ERNIE 4.5 thinking the prompt holds it."""

    begins_thinking = True


class WrappedAnswerParser(ThinkParser):
    """The answer stands between tags of its own, which belong to neither part. `wrappers` are pairs
    of them."""

    def __init__(self, prompt_text: str, chat_template_kwargs: Mapping[str, Any]) -> None:
        super().__init__(prompt_text, chat_template_kwargs)
        self._wrapped = False

    def _marker(self, marker: str, delta: ParsedDelta) -> bool:
        if super()._marker(marker, delta):
            return True
        if self._where is not _Where.ANSWER or self._answer is None:
            return False
        if marker in self.wrappers[::2] and not self._wrapped and not self._answer.begun:
            self._wrapped, self._answer = True, _Trimmer()
            return True
        if marker in self.wrappers[1::2] and self._wrapped:
            # The line break before the end tag belongs to the tag; a new part follows.
            self._wrapped, self._answer = False, _Trimmer()
            return True
        return False


class ErnieX1Parser(WrappedAnswerParser):
    """ERNIE X1: thinking, </think>, then <response>answer</response> and possibly tool calls."""

    wrappers: ClassVar[tuple[str, ...]] = (RESPONSE, END_RESPONSE)
    markers: ClassVar[tuple[str, ...]] = (THINK, END_THINK, *wrappers)
    begins_thinking = True


class _TagsAlways(WrappedAnswerParser):
    """The answer stands between its tags whether the model has thought or not."""

    def __init__(self, prompt_text: str, chat_template_kwargs: Mapping[str, Any]) -> None:
        super().__init__(prompt_text, chat_template_kwargs)
        if self._passes_all:
            self._passes_all, self._answer = False, _Trimmer()

    def _marker(self, marker: str, delta: ParsedDelta) -> bool:
        if marker in self.wrappers[::2] and self._where is _Where.START:
            self._end_thinking()
        return super()._marker(marker, delta)


class HunyuanThinkParser(_TagsAlways):
    """Hunyuan-A13B: the answer stands in <answer>."""

    wrappers: ClassVar[tuple[str, ...]] = ("<answer>", "</answer>")
    markers: ClassVar[tuple[str, ...]] = (THINK, END_THINK, *wrappers)


class CommandThinkParser(_TagsAlways):
    """Command from R7B on: tokens around the thinking, and around an answer that calls nothing."""

    begin, end = "<|START_THINKING|>", "<|END_THINKING|>"
    wrappers: ClassVar[tuple[str, ...]] = (
        *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        *("<|START_TEXT|>", "<|END_TEXT|>"),
    )
    markers: ClassVar[tuple[str, ...]] = (begin, end, *wrappers)


class SeedThinkParser(ThinkParser):
    """Seed-OSS: tags of its own name."""

    begin, end = "<seed:think>", "</seed:think>"
    markers: ClassVar[tuple[str, ...]] = (begin, end)


class MistralThinkParser(ThinkParser):
    """Magistral and later: [THINK] and [/THINK] are tokens."""

    begin, end = "[THINK]", "[/THINK]"
    markers: ClassVar[tuple[str, ...]] = (begin, end)


class Gemma4ThinkParser(ThinkParser):
    """Gemma 4: thinking is a channel of that name."""

    begin, end = "<|channel>thought", "<channel|>"
    markers: ClassVar[tuple[str, ...]] = ("<|channel>", end)


class GraniteThinkParser(ThinkParser):
    """Granite 3.2 and 3.3 announce both parts in words."""

    begin, end = "Here is my thought process:", "Here is my response:"
    markers: ClassVar[tuple[str, ...]] = ()
