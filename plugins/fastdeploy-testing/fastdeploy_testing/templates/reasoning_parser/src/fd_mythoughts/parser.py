"""Divides an answer into what stands between <think> and </think>, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fastdeploy_core.contracts.small import ParsedDelta

BEGIN, END = "<think>", "</think>"


class MyThoughtsParser:
    """One instance per answer. Text arrives in pieces of any size."""

    markers: ClassVar[tuple[str, ...]] = (BEGIN, END)

    def __init__(self, prompt_text: str, chat_template_kwargs: Mapping[str, Any]) -> None:
        # A template may have begun the thinking already.
        self._is_thinking = prompt_text.rstrip().endswith(BEGIN)
        self._held = ""  # text that is not decided yet

    def push(self, text: str) -> ParsedDelta:
        """Text up to the next marker; its beginning is held back."""
        self._held += text
        found = ParsedDelta()
        while True:
            marker = END if self._is_thinking else BEGIN
            before, is_there, after = self._held.partition(marker)
            if not is_there:
                keep = _begun(marker, before)
                self._add(found, before[: len(before) - keep])
                self._held = before[len(before) - keep :]
                return found
            self._add(found, before)
            self._is_thinking, self._held = not self._is_thinking, after

    def finish(self) -> ParsedDelta:
        """The text has ended: what is held back was no marker."""
        found = ParsedDelta()
        self._add(found, self._held)
        self._held = ""
        return found

    def _add(self, found: ParsedDelta, text: str) -> None:
        if self._is_thinking:
            found.reasoning += text
        else:
            found.content += text


def _begun(marker: str, text: str) -> int:
    """How many characters at the end may be the beginning of the marker."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((n for n in lengths if marker.startswith(text[len(text) - n :])), 0)
