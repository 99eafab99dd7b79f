"""How drafts fared: in all, for the metrics, and by sequence, for its answer.

A step only leaves its numbers here; they are added up for many steps at once, at the latest when a
sequence leaves its place.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .columns import Columns

MOST_NOTED = 16


class DraftTally:
    """Totals only grow; they are written by the engine's thread and read by anybody."""

    def __init__(self, columns: Columns, most: int) -> None:
        self._columns = columns
        self._noted: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.num_steps = 0  # rows that had drafts, summed over steps
        self.num_drafted = 0
        self.accepted_at = np.zeros(most, dtype=np.int64)  # by place: rows right up to there

    def note(self, places: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Of these sequences so many drafts were fed in a step, the first `accepted` of which were
        right. The arrays are kept."""
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
        # Mostly the same sequences many times, each once in a step: added up before they are looked for.
        noted, self._noted = self._noted, []
        for _, steps in groupby(noted, lambda step: id(step[0])):
            same, drafts, rights = zip(*steps, strict=True)
            places, drafted, accepted = same[0], np.array(drafts), np.array(rights)
            had = drafted > 0
            is_right = had[:, :, None] & (counted < accepted[:, :, None])
            num_steps, num_drafted, num_right = had.sum(0), drafted.sum(0), is_right.sum(0)
            columns.draft_steps[places] += num_steps
            columns.drafted[places] += num_drafted
            columns.accepted_at[places] += num_right
            self.num_steps += int(num_steps.sum())
            self.num_drafted += int(num_drafted.sum())
            self.accepted_at = self.accepted_at + num_right.sum(0)
