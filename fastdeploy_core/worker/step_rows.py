"""The rows of one step as arrays, in batch order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(slots=True)
class StepRows:
    """One step as arrays; B rows, T tokens, R sampled positions."""

    slots: np.ndarray  # [B] int64
    starts: np.ndarray  # [B] int64: tokens in the cache before this step
    counts: np.ndarray  # [B] int64: tokens fed
    seq_lens: np.ndarray  # [B] int64: starts + counts
    num_drafts: np.ndarray  # [B] int64: the last tokens fed are unverified drafts
    samples: np.ndarray  # [B] bool: whether the row samples
    is_decode: bool  # one token per row, every row samples
    # Rows that sample, expanded by drafts: sampled position r belongs to batch row sample_rows[r].
    sample_rows: np.ndarray  # [R] int64
    sample_tokens: np.ndarray  # [R] int64: which of the T tokens its logits come from
    sample_positions: np.ndarray  # [R] int64: where the sampled token will stand
    # BatchRows.is_ahead: positions and num_drafts are the most until `settle`.
    is_ahead: bool = False

    def fits_next(self) -> bool:
        """Whether each row can be fed the token it sampled, with nothing to be judged before."""
        return bool(self.samples.all()) and not self.num_drafts.any()

    def fits(self, num_drafts: int) -> bool:
        """Whether every row feeds its newest token and at most so many drafts, and samples."""
        return (
            bool(self.samples.all())
            and bool((self.counts == 1 + self.num_drafts).all())
            and int(self.num_drafts.max(initial=0)) <= num_drafts
        )

    def widen(self, width: int) -> StepRows:
        """The same rows where every one is padded to `width` tokens, all of which are sampled over."""
        nth = np.tile(np.arange(width), self.slots.size)
        rows = np.repeat(np.arange(self.slots.size), width)
        return replace(
            self,
            sample_rows=rows,
            sample_tokens=np.arange(rows.size),
            sample_positions=self.starts[rows] + 1 + nth,
        )

    def settle(self, starts: np.ndarray, num_drafts: np.ndarray) -> None:
        """What the device has known all along."""
        nth = self.sample_positions - self.starts[self.sample_rows]
        self.sample_positions = starts[self.sample_rows] + nth
        self.starts, self.num_drafts = starts, num_drafts
