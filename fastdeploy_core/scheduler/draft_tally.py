"""How drafts fared: in all, for the metrics, and by sequence, for its answer.

A step only leaves its numbers here; they are added up for many steps at once, at the latest when a
sequence leaves its place.
"""

from __future__ import annotations

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
        columns = self._columns
        places, drafted, accepted = map(np.concatenate, zip(*self._noted, strict=True))
        self._noted.clear()
        had = drafted > 0
        if not had.all():
            places, drafted, accepted = places[had], drafted[had], accepted[had]
        is_right = np.arange(self.accepted_at.size) < accepted[:, None]
        np.add.at(columns.draft_steps, places, 1)
        np.add.at(columns.drafted, places, drafted)
        np.add.at(columns.accepted_at, places, is_right)
        self.num_steps += places.size
        self.num_drafted += int(drafted.sum())
        self.accepted_at = self.accepted_at + is_right.sum(0)
