"""The numbers of all sequences that change with every step, in columns: one place per sequence.

A step of hundreds of sequences is then a few operations on arrays; Python code runs only for those
sequences where something happens. `Sequence` shows its own place under ordinary names.
"""

from __future__ import annotations

import numpy as np

from .draft_tally import DraftTally

_FIRST_SIZE = 64


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
        # Known tokens up to which a result is one more token and nothing else: Sequence.show_quiet.
        self.quiet_until = np.zeros(0, dtype=np.int64)
        self.deltas = np.zeros(
            0, dtype=np.int64
        )  # deltas given to its request, if it is the only one
        self.step = np.zeros(0, dtype=np.int64)  # the newest step that it is part of
        # Drafts for the next step, and how those of all steps fared (draft_tally.py).
        self.drafts = np.zeros((0, num_drafts), dtype=np.int64)
        self.num_drafts = np.zeros(0, dtype=np.int64)
        self.has_drafts = False  # whether any of these may be above 0
        self.draft_steps = np.zeros(0, dtype=np.int64)
        self.drafted = np.zeros(0, dtype=np.int64)
        self.accepted_at = np.zeros((0, num_drafts), dtype=np.int64)
        self.tally = DraftTally(self, num_drafts)
        # A result is a token and nothing else, and what it draws depends on nothing that the host would have
        # to know before.
        self.goes_ahead = np.zeros(0, dtype=bool)
        self.kind = np.zeros(
            0, dtype=np.int64
        )  # what its steps cost differs by: Sequence.show_plain

    def take(self, seq_id: int) -> int:
        """A clean place."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        for column in self._all():
            column[place] = 0
        self.seq_id[place] = seq_id
        self.step[place] = -1
        return place

    def take_drafts(self, places: np.ndarray, proposals: np.ndarray) -> None:
        """[places, k] drafts for the next step, -1 behind the last one."""
        self.drafts[places, : proposals.shape[1]] = proposals
        self.num_drafts[places] = (proposals >= 0).sum(1)
        self.has_drafts = True

    def release(self, place: int) -> None:
        """Nobody is there any more."""
        self.tally.fold()
        self.seq_id[place] = -1
        self._free.append(place)

    def _all(self) -> list[np.ndarray]:
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def _grow(self) -> None:
        old, self._size = self._size, max(_FIRST_SIZE, 2 * self._size)
        for name, value in list(vars(self).items()):
            if isinstance(value, np.ndarray):
                grown = np.zeros((self._size, *value.shape[1:]), dtype=value.dtype)
                grown[:old] = value
                setattr(self, name, grown)
        self._free.extend(range(self._size - 1, old - 1, -1))
