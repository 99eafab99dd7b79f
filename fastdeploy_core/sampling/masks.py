"""Which tokens are forbidden, as one bit per token.

allowed_token_ids, bad words, min_tokens and grammars all only forbid. What is forbidden once stays
so whatever penalties or biases do to it, so all of them become one mask, applied once, and the order
among them does not matter.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fastdeploy_core.contracts.small import GrammarMatcher
from fastdeploy_core.errors import FastDeployError, InvalidRequest
from fastdeploy_core.types import SamplingParams

from .columns import BAD_WORDS, GRAMMAR, MASK, MIN_TOKENS, SamplingColumns, SamplingPlan

ALL = np.uint32(0xFFFFFFFF)
ONES = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))

# Generated tokens of a slot, as the host knows them.
OutputTokens = Callable[[int], np.ndarray]


def clear(mask: np.ndarray, token_ids: np.ndarray) -> None:
    """Forbid tokens. mask: [words] uint32."""
    np.bitwise_and.at(mask, token_ids >> 5, ~ONES[token_ids & 31])


class TokenMasks:
    """Masks of every slot; rows are [ceil(vocabulary / 32)] words, bit set = possible."""

    def __init__(self, columns: SamplingColumns, max_num_seqs: int) -> None:
        self._columns = columns
        self._vocab_size = columns.vocab_size
        self.num_words = (columns.vocab_size + 31) // 32
        self._fixed = np.full((max_num_seqs, self.num_words), ALL, dtype=np.uint32)
        self._ends: list[np.ndarray | None] = [None] * max_num_seqs
        self._bad_words: list[list[tuple[np.ndarray, np.ndarray]] | None] = [None] * max_num_seqs
        self.matchers: dict[int, GrammarMatcher] = {}  # by slot; filled by the model runner

    def add(self, slot: int, params: SamplingParams, eos_token_ids: list[int]) -> None:
        """Take one sequence's fixed constraints. Token ids outside the vocabulary are refused, or
        ignored where the model and not the client named them."""
        params.check_vocabulary(self._vocab_size)
        fixed = self._fixed[slot]
        if params.allowed_token_ids is not None:
            fixed[:] = 0
            allowed = np.asarray(params.allowed_token_ids, dtype=np.int64)
            np.bitwise_or.at(fixed, allowed >> 5, ONES[allowed & 31])
            self._columns.set_flag(slot, MASK)
        several: list[tuple[np.ndarray, np.ndarray]] = []
        for word in params.bad_words_token_ids or []:
            ids = np.asarray(word, dtype=np.int64)
            if ids.size == 1:
                clear(fixed, ids)
                self._columns.set_flag(slot, MASK)
            elif ids.size:
                several.append((ids[:-1], ids[-1:]))
        if several:
            self._bad_words[slot] = several
            self._columns.set_flag(slot, BAD_WORDS)
        if params.min_tokens > 0:
            ends = np.asarray([*eos_token_ids, *(params.stop_token_ids or [])], dtype=np.int64)
            self._ends[slot] = ends[(ends >= 0) & (ends < self._vocab_size)]

    def add_matcher(self, slot: int, matcher: GrammarMatcher) -> None:
        """The sequence is bound to a grammar."""
        self.matchers[slot] = matcher
        self._columns.set_flag(slot, GRAMMAR)

    def reset(self, slot: int) -> None:
        """Back to what an unused slot holds."""
        self._fixed[slot] = ALL
        self._ends[slot] = self._bad_words[slot] = None
        self.matchers.pop(slot, None)

    def build(
        self, plan: SamplingPlan, num_output: np.ndarray, output_tokens: OutputTokens
    ) -> tuple[np.ndarray | None, np.ndarray | None, dict[int, str]]:
        """(rows with a mask, their masks [n, words] int32, errors by row) of this step.

        num_output: tokens generated before this one, per row.
        """
        wanted = plan.row_flags & (MASK | BAD_WORDS | GRAMMAR)
        below = np.zeros(plan.num_rows, dtype=bool)
        if plan.flags & MIN_TOKENS:
            below = num_output < plan.min_tokens
        rows = np.flatnonzero((wanted != 0) | below)
        errors: dict[int, str] = {}
        if not rows.size:
            return None, None, errors
        masks = self._fixed[plan.slots[rows]]
        for index, row in enumerate(rows.tolist()):
            slot = int(plan.slots[row])
            mask = masks[index]
            finished = False
            if wanted[row] & GRAMMAR:
                finished, error = self._grammar(slot, mask)
                if error:
                    errors[row] = error
            if wanted[row] & BAD_WORDS:
                self._forbid_bad_words(slot, mask, output_tokens(slot))
            ends = self._ends[slot]
            # A finished grammar leaves the end of text as the only way on, whatever min_tokens says.
            if below[row] and ends is not None and not finished:
                clear(mask, ends)
        return rows, masks.view(np.int32), errors

    def accept(self, slot: int, token_ids: list[int]) -> bool:
        """Advance the slot's grammar; False when a token does not fit."""
        return self.matchers[slot].accept(token_ids) == len(token_ids)

    def _grammar(self, slot: int, mask: np.ndarray) -> tuple[bool, str]:
        matcher = self.matchers[slot]
        possible = np.empty(self.num_words, dtype=np.int32)
        try:
            matcher.fill_mask(possible)
        except InvalidRequest as error:
            return False, str(error)
        except (FastDeployError, ValueError, RuntimeError):  # a grammar plugin's own failure
            return False, "the grammar backend failed"
        mask &= possible.view(np.uint32)
        return matcher.is_finished(), ""

    def _forbid_bad_words(self, slot: int, mask: np.ndarray, output: np.ndarray) -> None:
        for prefix, last in self._bad_words[slot] or ():
            if output.size >= prefix.size and (output[-prefix.size :] == prefix).all():
                clear(mask, last)
