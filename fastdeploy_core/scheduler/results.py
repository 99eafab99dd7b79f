"""What the workers said of a step, by row."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import numpy as np

from fastdeploy_core.types import ModelRunnerOutput


@cache
def _ones(num_rows: int) -> np.ndarray:
    ones = np.ones(num_rows, dtype=np.int64)
    ones.flags.writeable = False
    return ones


class StepResults:
    """A step's output, row by row."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output
        self._tokens: list[int] = output.token_ids.tolist()
        self._ends: list[int] | None = None
        if output.counts is not None:
            self._ends = list(accumulate(output.counts.tolist()))

    def is_of(self, num_rows: int) -> bool:
        """Whether these are so many rows, and the tokens theirs."""
        if self._ends is None:
            return len(self._tokens) == num_rows
        return len(self._ends) == num_rows and (self._ends or [0])[-1] == len(self._tokens)

    @property
    def has_counts(self) -> bool:
        """Whether rows may have another number of tokens than one."""
        return self.output.counts is not None

    def drafts(self, num_rows: int) -> tuple[np.ndarray, np.ndarray] | None:
        """[num_decodes, num_rows] drafts that the leading rows were fed in each decode, and how
        many of them were accepted. None: no row could have any."""
        output = self.output
        if output.num_drafts is None or output.num_accepted is None:
            return None
        return output.num_drafts[:, :num_rows], output.num_accepted[:, :num_rows]

    def leading_counts(self, num_rows: int) -> np.ndarray:
        """How many tokens each of the leading rows has."""
        if self.output.counts is None:
            return _ones(num_rows)
        return self.output.counts[:num_rows]

    def leading_tokens(self, num_rows: int) -> list[int]:
        """Those of the leading rows."""
        number = num_rows if self._ends is None else self._ends[num_rows - 1]
        return self._tokens if number == len(self._tokens) else self._tokens[:number]

    def clear_others(self, only_tokens: np.ndarray) -> None:
        """Clear leading rows that have more to say than tokens."""
        output = self.output
        for rows in (output.errors, output.logprobs, output.prompt_logprobs):
            if rows:
                only_tokens[[row for row in rows if row < only_tokens.size]] = False

    def tokens_of(self, row: int) -> list[int]:
        """Those of any row."""
        if self._ends is None:
            return [self._tokens[row]]
        return self._tokens[self._ends[row - 1] if row else 0 : self._ends[row]]
