"""A grammar that binds only after the model's thinking.

The worker wraps any backend's matcher in it, so grammar plugins do not handle thinking. Front ends
decide whether an answer may think (parsers/answer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_core.contracts.small import GrammarMatcher
from fastdeploy_core.types import GrammarStart


class MatcherAfterThinking:
    """A GrammarMatcher with three phases: it may think, it thinks, the grammar binds.

    While it may think, the possible tokens are the grammar's first tokens and the token that begins
    thinking. While it thinks, all tokens are possible, the end of the text included.
    """

    def __init__(self, matcher: GrammarMatcher, start: GrammarStart) -> None:
        self._matcher = matcher
        self._start = start
        self._may_think = start.begin is not None  # and thinking has not begun
        self._num_free = 0  # tokens of the thinking, its begin and end tokens included
        self._num_bound = 0  # tokens the grammar has seen
        self._is_bound = False

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by tokens; returns how many were accepted."""
        taken = 0
        for token_id in token_ids:
            if self._is_bound:
                break
            if self._at_start() and token_id != self._start.begin:
                self._is_bound = True
                break
            self._num_free += 1
            self._is_bound = token_id == self._start.end
            taken += 1
        rest = token_ids[taken:]
        if len(rest):
            num_bound = self._matcher.accept(rest)
            self._num_bound += num_bound
            taken += num_bound
        if not self._num_bound and not self._num_free:
            self._is_bound = False  # no token was accepted: it may still think
        return taken

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""
        bound = min(num_tokens, self._num_bound)
        if bound:
            self._matcher.rollback(bound)
            self._num_bound -= bound
        free = num_tokens - bound
        self._num_free -= free
        if free or not (self._num_bound or self._num_free):
            self._is_bound = False

    def fill_mask(self, mask: np.ndarray) -> None:
        """Write the mask of possible tokens. mask: [ceil(vocab_size / 32)] int32."""
        if not self._is_bound and not self._at_start():
            mask[:] = -1
            return
        self._matcher.fill_mask(mask)
        if not self._is_bound and self._start.begin is not None:
            word, bit = divmod(self._start.begin, 32)
            mask.view(np.uint32)[word] |= np.uint32(1 << bit)

    def is_finished(self) -> bool:
        """Whether only the end of text can follow."""
        return self._is_bound and self._matcher.is_finished()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)  # what a BesideMatcher has

    def _at_start(self) -> bool:
        """Whether thinking is possible and no token has arrived yet."""
        return self._may_think and not self._num_free
