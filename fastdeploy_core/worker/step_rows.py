"""The rows of one step as arrays, in batch order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .step_shapes import StepShape


def padded(tokens: np.ndarray, size: int) -> np.ndarray:
    """[size] int64: the tokens, zeros behind them."""
    found = np.zeros(size, dtype=np.int64)
    found[: tokens.size] = tokens
    return found


@dataclass(slots=True)
class StepRows:
    """One step as arrays; B rows, T tokens, R sampled positions."""

    slots: np.ndarray  # [B] int64
    starts: np.ndarray  # [B] int64: tokens in the cache before this step
    counts: np.ndarray  # [B] int64: tokens fed, in all decodes
    seq_lens: np.ndarray  # [B] int64: starts + counts
    num_drafts: np.ndarray  # [B] int64: the last tokens fed, each time, are unverified drafts
    samples: np.ndarray  # [B] bool: whether the row samples
    is_decode: bool  # one token per row at a time, every row samples
    # Rows that sample, expanded by drafts: sampled position r belongs to batch row sample_rows[r].
    sample_rows: np.ndarray  # [R] int64
    sample_tokens: np.ndarray  # [R] int64: which of the T tokens its logits come from
    # [R] int64: where the sampled token will stand; with several decodes of one token the last
    sample_positions: np.ndarray
    # BatchRows.is_ahead: positions and num_drafts are the most until `settle`.
    is_ahead: bool = False
    num_decodes: int = 1  # see SchedulerOutput
    shape: StepShape | None = None  # what the step is padded to, if it is; T is then of that

    def first_tokens(self) -> np.ndarray:
        """[B] which of the T tokens each row begins with."""
        if self.shape is not None:
            return np.arange(self.slots.size) * self.shape.tokens
        first: np.ndarray = np.cumsum(self.counts) - self.counts
        return first

    def read_tokens(self) -> np.ndarray | None:
        """[n] int64, as ForwardContext.rows: sample_tokens, at least one number; None: they are all of the T
        tokens. In a padded step always, and n goes with the shape."""
        size = max(1, self.sample_tokens.size)
        if self.shape is not None:
            size = self.shape.rows * (self.shape.tokens if self.num_drafts.any() else 1)
        elif self.is_decode:
            return None
        return padded(self.sample_tokens, size)

    def shaped(self, shape: StepShape) -> StepRows:
        """The same rows in a padded step."""
        own = self.sample_tokens - self.first_tokens()[self.sample_rows]
        first = self.sample_rows * shape.tokens
        return replace(self, shape=shape, sample_tokens=first + own)

    def fits_next(self) -> bool:
        """Whether each row can be fed the token it sampled, with nothing to be judged before."""
        return bool(self.samples.all()) and not self.num_drafts.any()

    def most_drafts(self) -> int:
        """Of any row; those that go ahead all have as many."""
        return int(self.num_drafts[0] if self.is_ahead else self.num_drafts.max(initial=0))

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
