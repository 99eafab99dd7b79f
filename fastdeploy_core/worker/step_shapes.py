"""Shapes of steps on a device that compiles each one: which shape a step is padded to, which there are.

A step becomes a rectangle: `rows` rows of `tokens` tokens, and a block table `blocks` wide. Padding
stands at the end of a row, or is a row of its own; it is stored nowhere and read by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.errors import WorkerError

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.device import DeviceLimits, StepBuckets

    from .step_rows import StepRows


@dataclass(frozen=True, slots=True)
class StepShape:
    """One rectangle."""

    rows: int
    tokens: int  # of each row
    blocks: int  # of each row's table

    def spread(self, rows: StepRows, values: np.ndarray, nothing: int = 0) -> np.ndarray:
        """[rows * tokens]: one value for each of the step's tokens put where its token stands."""
        full = np.full(self.rows * self.tokens, nothing, dtype=values.dtype)
        first = np.arange(rows.slots.size) * self.tokens
        nth = np.arange(values.size) - np.repeat(np.cumsum(rows.counts) - rows.counts, rows.counts)
        full[np.repeat(first, rows.counts) + nth] = values
        return full

    def pad(self, values: np.ndarray, nothing: int = 0) -> np.ndarray:
        """[rows, ...]: one entry per row, and `nothing` for rows of nobody."""
        full = np.full((self.rows, *values.shape[1:]), nothing, dtype=values.dtype)
        full[: len(values)] = values
        return full


class StepShapes:
    """All shapes that steps of one engine can have."""

    def __init__(
        self,
        buckets: StepBuckets,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        max_model_len: int,
        block_size: int,
        max_drafts: int = 0,
    ) -> None:
        self._block_size, self._longest = block_size, max_model_len
        most_rows = min(max_num_seqs, max(buckets.decode_rows))
        most_tokens = min(max_step_tokens, max_model_len, max(buckets.prompt_tokens))
        self._prompt_tokens = _up_to(buckets.prompt_tokens, most_tokens)
        self._prompt_rows = _up_to(buckets.prompt_rows, min(max_num_seqs, max(buckets.prompt_rows)))
        self._decode_rows = _up_to(buckets.decode_rows, most_rows)
        self._draft_width = 1 + max_drafts
        widest = self._blocks(max_model_len - 1 + max(self._prompt_tokens[-1], 1 + max_drafts))
        self._blocks_wide = (*(b for b in buckets.table_blocks if b < widest), widest)

    @classmethod
    def of(cls, config: EngineConfig, limits: DeviceLimits) -> StepShapes | None:
        """What steps are padded to, where the device compiles every shape; None: as they come."""
        if limits.step_buckets is None:
            return None
        speculative = config.speculative
        return cls(
            limits.step_buckets,
            max_num_seqs=config.batch.max_num_seqs,
            max_step_tokens=config.batch.max_num_batched_tokens,
            max_model_len=config.model.max_model_len,
            block_size=config.cache.block_size,
            max_drafts=0 if speculative is None else speculative.num_speculative_tokens,
        )

    def find(self, rows: StepRows) -> StepShape:
        """The smallest shape that holds the step."""
        longest = int(rows.counts.max(initial=1))
        if longest <= self._draft_width:
            tokens = 1 if longest == 1 else self._draft_width
            row_buckets = self._decode_rows
        else:
            tokens, row_buckets = _fit(self._prompt_tokens, longest, "tokens"), self._prompt_rows
        needed = self._blocks(int(rows.starts.max(initial=0)) + tokens)
        return StepShape(
            _fit(row_buckets, rows.slots.size, "rows"),
            tokens,
            _fit(self._blocks_wide, needed, "blocks per row"),
        )

    def __iter__(self) -> Iterator[tuple[StepShape, int, int]]:
        """Every shape with a start and a number of tokens of a row that is padded to it."""
        widths = [(1, 1)] if self._draft_width == 1 else [(1, 1), (self._draft_width, 2)]
        kinds = [(self._decode_rows, tokens, fewest) for tokens, fewest in widths]
        for before, tokens in pairwise((self._draft_width, *self._prompt_tokens)):
            if tokens > before:
                kinds.append((self._prompt_rows, tokens, before + 1))
        for row_buckets, tokens, count in kinds:
            for narrower, blocks in pairwise((0, *self._blocks_wide)):
                start = min(blocks * self._block_size - tokens, self._longest - count)
                if start < 0 or self._blocks(start + tokens) <= narrower:
                    continue  # no step of so many tokens has so narrow, or so wide, a table
                for rows in row_buckets:
                    yield StepShape(rows, tokens, blocks), start, count

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _up_to(buckets: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Those that are needed for at most so many."""
    ordered = sorted(buckets)
    last = next((b for b in ordered if b >= most), ordered[-1])
    return tuple(b for b in ordered if b <= last)


def _fit(buckets: tuple[int, ...], number: int, what: str) -> int:
    for bucket in buckets:
        if bucket >= number:
            return bucket
    raise WorkerError(f"a step has {number} {what}; the device takes at most {max(buckets)}")
