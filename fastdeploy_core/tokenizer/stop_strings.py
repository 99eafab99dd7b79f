"""Finds stop strings in text that arrives in pieces, and holds back text that may become one.

An Aho-Corasick automaton: it reads every character once, for any number of stop strings, so the
cost is linear in the text and independent of how it is cut into pieces.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class StopStringMatcher:
    """Takes text in pieces; the text it returns never contains any part of the stop string that
    ends it.

    The stop string that is complete first wins; of several complete at the same character, the
    longest. So the result does not depend on how the text was cut.
    """

    __slots__ = ("_depths", "_fail", "_first", "_goto", "_held", "_include", "_node", "_word")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._include = include_stop
        self._goto: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        self._word: list[int] = [0]  # length of the longest stop string that ends at this node
        self._node = 0
        # text of the current node: the longest end of the text that may begin a stop string
        self._held = ""
        self._depths: list[int] = [0]
        self._build(stops)
        firsts = "".join(re.escape(char) for char in sorted(self._goto[0]))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def push(self, text: str, match: bool = True) -> tuple[str, str | None]:
        """Add text; returns the text that may be shown, and the stop string found, if any.

        With match=False complete stop strings are let through (min_tokens is not reached yet); one
        that begins there and ends later still counts. After a match nothing more may be pushed.
        """
        if self._first is None:
            return text, None
        position = len(self._held)
        whole = self._held + text
        end = len(whole)
        while position < end:
            if self._node == 0:
                found = self._first.search(whole, position)
                if found is None:
                    break
                position = found.start()
            self._step(whole[position])
            position += 1
            length = self._word[self._node]
            if length and match:
                stop = whole[position - length : position]
                self._held = ""
                return whole[: position if self._include else position - length], stop
        keep = end - self._depths[self._node]
        self._held = whole[keep:]
        return whole[:keep], None

    def finish(self) -> str:
        """The text has ended; returns what was held back, which is no stop string after all."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _step(self, char: str) -> None:
        node = self._node
        while node and char not in self._goto[node]:
            node = self._fail[node]
        self._node = self._goto[node].get(char, 0)

    def _build(self, stops: Sequence[str]) -> None:
        depths = self._depths
        for stop in stops:
            node = 0
            for char in stop:
                child = self._goto[node].get(char)
                if child is None:
                    child = len(self._goto)
                    self._goto[node][char] = child
                    self._goto.append({})
                    self._fail.append(0)
                    self._word.append(0)
                    depths.append(depths[node] + 1)
                node = child
            self._word[node] = len(stop)
        queue = deque(self._goto[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._goto[node].items():
                queue.append(child)
                fail = self._fail[node]
                while fail and char not in self._goto[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._goto[fail].get(char, 0)
                self._word[child] = self._word[child] or self._word[self._fail[child]]
