"""What the workers said of a step, by row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from fastdeploy_core.types import ModelRunnerOutput, TokenLogprobs

from .step import ScheduledStep


class RowResult(NamedTuple):
    """What a step says of one row."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    drafts: np.ndarray | None = None  # [k] for its next step, -1 behind the last one
    error: str | None = None


@cache
def _ones(num_rows: int) -> np.ndarray:
    ones = np.ones(num_rows, dtype=np.int64)
    ones.flags.writeable = False
    return ones


class StepResults:
    """A step's output, row by row."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output
        self._tokens: list[int] = output.token_ids.tolist()
        self._ends: list[int] | None = None
        if output.counts is not None:
            self._ends = list(accumulate(output.counts.tolist()))

    @property
    def has_counts(self) -> bool:
        """Whether rows may have another number of tokens than one."""
        return self._output.counts is not None

    def fed_drafts(self, step: ScheduledStep) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each decode: [cohort] drafts that were fed to the step's cohort, which it may be that only the
        device knew, and how many of them were right."""
        output, size = self._output, step.drafts.size
        if output.num_drafts is None or output.num_right is None:
            fed = step.drafts if output.num_drafts is None else output.num_drafts[0, :size]
            yield fed, self.leading_counts(size) - 1
            return
        for fed, right in zip(output.num_drafts, output.num_right, strict=True):
            yield fed[:size], right[:size]

    @property
    def next_drafts(self) -> np.ndarray | None:
        """[rows, k] proposals for the next step."""
        return self._output.next_drafts

    def leading_counts(self, num_rows: int) -> np.ndarray:
        """How many tokens each of the leading rows has."""
        if self._output.counts is None:
            return _ones(num_rows)
        return self._output.counts[:num_rows]

    def leading_tokens(self, num_rows: int) -> list[int]:
        """Those of the leading rows."""
        number = num_rows if self._ends is None else self._ends[num_rows - 1]
        return self._tokens if number == len(self._tokens) else self._tokens[:number]

    def clear_others(self, only_tokens: np.ndarray) -> None:
        """Clear leading rows that have more to say than tokens."""
        output = self._output
        for rows in (output.errors, output.logprobs, output.prompt_logprobs):
            if rows:
                only_tokens[[row for row in rows if row < only_tokens.size]] = False

    def of_row(self, row: int) -> RowResult:
        """All of one row."""
        output = self._output
        if self._ends is None:
            tokens = [self._tokens[row]]
        else:
            tokens = self._tokens[self._ends[row - 1] if row else 0 : self._ends[row]]
        drafts = None if output.next_drafts is None else output.next_drafts[row]
        return RowResult(
            tokens,
            output.logprobs.get(row),
            output.prompt_logprobs.get(row),
            drafts,
            output.errors.get(row),
        )
