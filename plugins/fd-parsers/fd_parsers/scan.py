"""Finds markers in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastdeploy_core.contracts.small import ParsedDelta

CHUNK_CHARS = 1024


class MarkerScanner:
    """Splits pieces into text and markers; holds back the end of a piece if it could begin a
    marker."""

    __slots__ = ("_beginnings", "_held", "_pattern")

    def __init__(self, markers: Sequence[str]) -> None:
        longest_first = sorted(markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        lengths = range(max(map(len, markers)) - 1, 0, -1)
        self._beginnings = [
            {marker[:length] for marker in markers if len(marker) > length} for length in lengths
        ]
        self._held = ""

    def push(self, text: str) -> list[tuple[bool, str]]:
        """(is_marker, text) in order; joined, they are the input up to what is held back."""
        text = self._held + text
        found: list[tuple[bool, str]] = []
        position = 0
        for match in self._pattern.finditer(text):
            if match.start() > position:
                found.append((False, text[position : match.start()]))
            found.append((True, match.group()))
            position = match.end()
        end = self._certain_end(text, position)
        if end > position:
            found.append((False, text[position:end]))
        self._held = text[end:]
        return found

    def finish(self) -> str:
        """The text has ended; what was held back is no marker."""
        held, self._held = self._held, ""
        return held

    def _certain_end(self, text: str, start: int) -> int:
        length = len(self._beginnings)
        for beginnings in self._beginnings:
            if len(text) - start >= length and text[len(text) - length :] in beginnings:
                return len(text) - length
            length -= 1
        return len(text)


def chunks(text: str) -> list[str]:
    """A long text in short pieces. Parsers rescan a piece after each call that they find in it, so
    short pieces keep them linear. The result does not depend on the cutting."""
    if len(text) <= CHUNK_CHARS:
        return [text]
    return [text[i : i + CHUNK_CHARS] for i in range(0, len(text), CHUNK_CHARS)]


def merge(deltas: Sequence[ParsedDelta]) -> ParsedDelta:
    """Join consecutive deltas."""
    if len(deltas) == 1:
        return deltas[0]
    return ParsedDelta(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        [call for delta in deltas for call in delta.tool_calls],
    )
