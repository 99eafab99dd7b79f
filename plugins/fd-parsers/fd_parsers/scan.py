"""Finds markers in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from fastdeploy_core.contracts.small import ParsedDelta, ToolCallDelta

CHUNK_CHARS = 1024
_T = TypeVar("_T")
Steps = Generator[None, None, _T]  # yields where it needs more text
_SPACE = re.compile(r"\s*")


class Markers:
    """A set of markers: where the first one stands, and what may begin one."""

    __slots__ = ("_beginnings", "_pattern")

    def __init__(self, markers: Sequence[str]) -> None:
        longest_first = sorted(markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        lengths = range(max(map(len, markers), default=1) - 1, 0, -1)
        self._beginnings = [
            {marker[:length] for marker in markers if len(marker) > length} for length in lengths
        ]

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """The first marker at or after `start`."""
        return self._pattern.search(text, start)

    def certain_end(self, text: str, start: int) -> int:
        """Where text without markers ends for certain: before what could begin one."""
        length = len(self._beginnings)
        for beginnings in self._beginnings:
            if len(text) - start >= length and text[len(text) - length :] in beginnings:
                return len(text) - length
            length -= 1
        return len(text)


@lru_cache(maxsize=256)
def _markers(words: tuple[str, ...]) -> Markers:
    return Markers(words)


class MarkerScanner:
    """Splits pieces into text and markers; holds back the end of a piece if it could begin a
    marker."""

    __slots__ = ("_held", "_markers")

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = _markers(tuple(markers))
        self._held = ""

    def push(self, text: str) -> list[tuple[bool, str]]:
        """(is_marker, text) in order; joined, they are the input up to what is held back."""
        text = self._held + text
        found: list[tuple[bool, str]] = []
        position = 0
        while match := self._markers.find(text, position):
            if match.start() > position:
                found.append((False, text[position : match.start()]))
            found.append((True, match.group()))
            position = match.end()
        end = self._markers.certain_end(text, position)
        if end > position:
            found.append((False, text[position:end]))
        self._held = text[end:]
        return found

    def finish(self) -> str:
        """The text has ended; what was held back is no marker."""
        held, self._held = self._held, ""
        return held


class Reader:
    """Text that arrives in pieces, for a parser that is written as a generator: its methods are run
    with `yield from`, and yield while what they look for is not decided."""

    __slots__ = ("_at", "_ended", "_held_from", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held_from: int | None = None
        self._ended = False

    def add(self, text: str) -> None:
        """More text has arrived."""
        start = self._at if self._held_from is None else self._held_from
        self._text = self._text[start:] + text
        self._at -= start
        if self._held_from is not None:
            self._held_from = 0

    def end(self) -> None:
        """No more text will arrive."""
        self._ended = True

    def hold(self, back: int = 0) -> None:
        """Keep what is read from here, or from `back` characters before, for `release`."""
        self._held_from = self._at - back

    def release(self) -> str:
        """Everything that was read since `hold`."""
        start = self._at if self._held_from is None else self._held_from
        self._held_from = None
        return self._text[start : self._at]

    def more(self) -> Steps[bool]:
        """Wait for text; False where none will come."""
        if self._ended:
            return False
        yield
        return True

    def char(self) -> Steps[str]:
        """The next character, which stays; empty at the end of the text."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def peek(self, count: int) -> Steps[str]:
        """The next characters, which stay; fewer at the end of the text."""
        while len(self._text) - self._at < count:
            if not (yield from self.more()):
                break
        return self._text[self._at : self._at + count]

    def take(self, count: int) -> None:
        """Go on after characters that were looked at."""
        self._at += count

    def back(self, count: int) -> None:
        """Unread what was taken last, with no wait since."""
        self._at -= count

    def space(self) -> Steps[str]:
        """White space that stands here."""
        found = []
        while True:
            match = _SPACE.match(self._text, self._at)
            if match:
                found.append(match.group())
                self._at = match.end()
            if (yield from self.char()) == "" or not self._text[self._at].isspace():
                return "".join(found)

    def word(self, *words: str) -> Steps[str]:
        """The longest of these words that stands here, taken; empty if none does."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, words))]
            undecided = any(len(w) > len(rest) and w.startswith(rest) for w in words)
            if not undecided or not (yield from self.more()):
                break
        found = max((w for w in words if rest.startswith(w)), key=len, default="")
        self._at += len(found)
        return found

    def run(self, pattern: re.Pattern[str], limit: int) -> Steps[str]:
        """The characters here that match, which stay; empty if there are more than `limit`."""
        while True:
            match = pattern.match(self._text, self._at)
            end = match.end() if match else self._at
            if end - self._at > limit:
                return ""
            if end < len(self._text) or not (yield from self.more()):
                return self._text[self._at : end]

    def until(self, *stops: str, limit: int) -> Steps[tuple[str, str]]:
        """Text of at most `limit` characters up to a stop, and the stop; both taken. ("", "") if
        none comes, and nothing is taken."""
        markers = _markers(stops)
        while True:
            match = markers.find(self._text, self._at)
            end = match.start() if match else markers.certain_end(self._text, self._at)
            if end - self._at > limit:
                return "", ""
            if match:
                before, self._at = self._text[self._at : end], match.end()
                return before, match.group()
            if not (yield from self.more()):
                return "", ""

    def pass_until(self, emit: Callable[[str], object], *stops: str) -> Steps[str]:
        """Give text to `emit` as soon as it is certain, up to a stop, which is taken and returned;
        empty at the end of the text."""
        markers = _markers(stops)
        while True:
            match = markers.find(self._text, self._at)
            end = match.start() if match else markers.certain_end(self._text, self._at)
            if self._ended and not match:
                end = len(self._text)
            if end > self._at:
                emit(self._text[self._at : end])
                self._at = end
            if match:
                self._at = match.end()
                return match.group()
            if not (yield from self.more()):
                return ""


def chunks(text: str) -> list[str]:
    """A long text in short pieces. Parsers rescan a piece after each call that they find in it, so
    short pieces keep them linear. The result does not depend on the cutting."""
    if len(text) <= CHUNK_CHARS:
        return [text]
    return [text[i : i + CHUNK_CHARS] for i in range(0, len(text), CHUNK_CHARS)]


def merge(deltas: Sequence[ParsedDelta]) -> ParsedDelta:
    """Join consecutive deltas, and in them the pieces of each call."""
    if len(deltas) == 1:
        return deltas[0]
    calls: list[ToolCallDelta] = []
    for call in (call for delta in deltas for call in delta.tool_calls):
        if calls and calls[-1].index == call.index:
            calls[-1].arguments += call.arguments
        else:
            calls.append(call)
    return ParsedDelta(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        calls,
    )
