"""What the workers said of a step, by row."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from fastdeploy_core.types import ModelRunnerOutput, TokenLogprobs


class RowResult(NamedTuple):
    """What a step says of one row."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
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

    def drafts(self, num_rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each decode: [num_rows] drafts that the leading rows were fed, and how many of them
        were accepted. Empty: no row could have any."""
        output = self._output
        if output.num_drafts is None or output.num_accepted is None:
            return []
        pairs = zip(output.num_drafts, output.num_accepted, strict=True)
        return [(fed[:num_rows], accepted[:num_rows]) for fed, accepted in pairs]

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
        return RowResult(
            tokens,
            output.logprobs.get(row),
            output.prompt_logprobs.get(row),
            output.errors.get(row),
        )
