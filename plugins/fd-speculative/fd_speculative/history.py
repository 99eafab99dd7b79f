"""Finds earlier occurrences of a sequence's end: an index over its tokens that grows with them.

A new token costs a few dictionary operations at any length; a prompt is indexed by vector
operations when it is first seen.
"""

from __future__ import annotations

import array
from collections.abc import Sequence

import numpy as np

# Places compared per query, the most recent first. Repetitive text finds a full match among the
# first few; the limit bounds the cost of text without long matches.
MAX_PLACES = 32
_BASE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class TokenHistory:
    """The places of every `min_size` consecutive tokens of one sequence, linked from the most
    recent one back."""

    __slots__ = ("_before", "_last", "_max_size", "_min_size", "_num_indexed")

    def __init__(self, min_size: int, max_size: int) -> None:
        self._min_size, self._max_size = min_size, max_size
        # key of min_size tokens to the last position where they ended
        self._last: dict[int, int] = {}
        # by position: the previous position where the same tokens ended
        self._before = array.array("i")
        self._num_indexed = 0  # positions that are indexed

    def match(self, tokens: np.ndarray, drafts: Sequence[int] = ()) -> tuple[int, int]:
        """(number of last tokens that occurred together before, at most max_size; the place of the
        token that followed them there). (0, 0): not even min_size tokens did. Among equal lengths,
        the most recent place. `drafts` count as following the tokens but are not stored."""
        end = tokens.size - 1
        size = self._min_size
        if end < size:
            return 0, 0
        self._extend(tokens, end)
        tail = [*tokens[-min(self._max_size, end + 1) :].tolist(), *drafts][-self._max_size :]
        tail.reverse()
        place = self._last.get(_key(tail[size - 1 :: -1]), -1)
        best = best_place = 0
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            length = _common(tokens, place, tail, size)
            if length > best:
                best, best_place = length, place + 1
                if best >= len(tail):
                    break
            place = self._before[place]
        return best, best_place

    def _extend(self, tokens: np.ndarray, end: int) -> None:
        """Index the positions up to end - 1."""
        start, size = self._num_indexed, self._min_size
        if start >= end:
            return
        if start == 0 and end >= 64:
            self._index_all(tokens, end)
        else:
            part = tokens[max(0, start - size + 1) : end].tolist()
            first = start - (len(part) - (end - start))  # position of part[0]
            last, before = self._last, self._before
            for position in range(start, end):
                offset = position - first + 1
                if offset < size:
                    before.append(-1)
                    continue
                key = _key(part[offset - size : offset])
                before.append(last.get(key, -1))
                last[key] = position
        self._num_indexed = end

    def _index_all(self, tokens: np.ndarray, end: int) -> None:
        """Index all positions of a prompt at once."""
        size = self._min_size
        keys = np.zeros(end - size + 1, dtype=np.uint64)
        for offset in range(size):
            part = tokens[offset : end - size + 1 + offset].astype(np.uint64)
            keys = keys * np.uint64(_BASE) + part + np.uint64(1)
        positions = np.arange(size - 1, end, dtype=np.int64)
        order = np.argsort(keys, kind="stable")
        before = np.full(end, -1, dtype=np.int32)
        same = keys[order][1:] == keys[order][:-1]
        before[positions[order[1:][same]]] = positions[order[:-1][same]]
        self._before = array.array("i", before.tobytes())
        # the last position of each key remains
        self._last = dict(zip(keys.tolist(), positions.tolist(), strict=True))


def _key(tokens: list[int]) -> int:
    key = 0
    for token in tokens:
        key = (key * _BASE + token + 1) & _MASK
    return key


def _common(tokens: np.ndarray, place: int, tail: list[int], size: int) -> int:
    """How many tokens up to and including `place` equal the reversed tail; at least `size` do."""
    there = tokens[max(0, place + 1 - len(tail)) : place + 1].tolist()
    there.reverse()
    length = size
    while length < len(there) and there[length] == tail[length]:
        length += 1
    return length
