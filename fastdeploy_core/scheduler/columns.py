"""The numbers of all sequences that change with every step, in columns: one place per sequence.

A step of hundreds of sequences is then a few operations on arrays; Python code runs only for those
sequences where something happens. `Sequence` shows its own place under ordinary names.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

_FIRST_SIZE = 64
MOST_NOTED = 16  # steps whose drafts are added up at once


class Columns:
    """Arrays over places. They are replaced when they grow: do not keep them across `take`."""

    def __init__(self, num_drafts: int = 0) -> None:
        """num_drafts: the most of one sequence in one step."""
        self._free: list[int] = []
        self._size = 0
        self.seq_id = np.zeros(0, dtype=np.int64)
        self.known = np.zeros(0, dtype=np.int64)  # tokens whose ids the engine has
        self.computed = np.zeros(0, dtype=np.int64)  # tokens fed in all submitted steps
        self.pending = np.zeros(0, dtype=np.int64)  # sampled tokens that are still on their way
        self.in_flight = np.zeros(0, dtype=np.int64)  # submitted steps that touch its blocks
        self.at_start = np.zeros(0, dtype=np.int64)  # tokens to feed before it samples
        self.limit = np.zeros(0, dtype=np.int64)  # most tokens it may have
        self.room = np.zeros(0, dtype=np.int64)  # tokens that its blocks hold
        # Whether a result is tokens and nothing else, and computed tokens that fill the next block:
        # below that, and below its limit, a sequence only grows.
        self.is_plain = np.zeros(0, dtype=bool)
        self.commit_at = np.zeros(0, dtype=np.int64)
        self.deltas = np.zeros(0, dtype=np.int64)  # given to its request, if it is the only one
        self.step = np.zeros(0, dtype=np.int64)  # the newest step that it is part of
        # Drafts asked for with its newest step, and how those of all steps fared (DraftTally).
        self.asked = np.zeros(0, dtype=np.int64)
        self.draft_steps = np.zeros(0, dtype=np.int64)
        self.drafted = np.zeros(0, dtype=np.int64)
        self.accepted_at = np.zeros((0, num_drafts), dtype=np.int64)
        self.tally = DraftTally(self, num_drafts)
        self.kind = np.zeros(0, dtype=np.int64)  # GREEDY, RANDOM or OTHER, of sequence.py

    def take(self, seq_id: int) -> int:
        """A clean place."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        for column in vars(self).values():
            if isinstance(column, np.ndarray):
                column[place] = 0
        self.seq_id[place] = seq_id
        self.step[place] = -1
        return place

    def release(self, place: int) -> None:
        """Nobody is there any more."""
        self.tally.fold()
        self.seq_id[place] = -1
        self._free.append(place)

    def _grow(self) -> None:
        old, self._size = self._size, max(_FIRST_SIZE, 2 * self._size)
        for name, value in list(vars(self).items()):
            if isinstance(value, np.ndarray):
                grown = np.zeros((self._size, *value.shape[1:]), dtype=value.dtype)
                grown[:old] = value
                setattr(self, name, grown)
        self._free.extend(range(self._size - 1, old - 1, -1))


class DraftTally:
    """How drafts fared: in all, for the metrics, and by sequence, for its answer. A step leaves its
    numbers here; they are added up for many steps at once, at the latest when a sequence leaves its
    place. Totals only grow; they are written by the engine's thread and read by anybody."""

    def __init__(self, columns: Columns, most: int) -> None:
        self._columns = columns
        self._noted: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.num_steps = 0  # rows that had drafts, summed over steps
        self.num_drafted = 0
        self.accepted_at = np.zeros(most, dtype=np.int64)  # by place: rows right up to there

    def note(self, places: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Of these sequences so many drafts were fed in each decode of a step, the first `accepted`
        of which were right: [num_decodes, places]. The arrays are kept."""
        self._noted.append((places, drafted, accepted))
        if len(self._noted) >= MOST_NOTED:
            self.fold()

    def add(self, place: int, drafted: int, accepted: int) -> None:
        """The same for one sequence, and at once."""
        if drafted:
            columns = self._columns
            columns.draft_steps[place] += 1
            columns.drafted[place] += drafted
            columns.accepted_at[place, :accepted] += 1
            self.num_steps += 1
            self.num_drafted += drafted
            self.accepted_at[:accepted] += 1

    def fold(self) -> None:
        """Add up what was noted."""
        if not self._noted:
            return
        columns, counted = self._columns, np.arange(self.accepted_at.size)
        # Mostly the same sequences many times, each once in a step: added up before they are looked
        # for.
        noted, self._noted = self._noted, []
        for _, steps in groupby(noted, lambda step: id(step[0])):
            same, drafts, rights = zip(*steps, strict=True)
            places, drafted, accepted = same[0], np.concatenate(drafts), np.concatenate(rights)
            had = drafted > 0
            is_right = had[:, :, None] & (counted < accepted[:, :, None])
            num_steps, num_drafted, num_right = had.sum(0), drafted.sum(0), is_right.sum(0)
            columns.draft_steps[places] += num_steps
            columns.drafted[places] += num_drafted
            columns.accepted_at[places] += num_right
            self.num_steps += int(num_steps.sum())
            self.num_drafted += int(num_drafted.sum())
            self.accepted_at = self.accepted_at + num_right.sum(0)
