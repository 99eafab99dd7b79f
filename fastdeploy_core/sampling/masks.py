"""Which tokens are forbidden, as one bit per token.

allowed_token_ids, bad words, min_tokens and grammars all only forbid. What is forbidden once stays
so whatever penalties or biases do to it, so all of them become one mask, applied once, and the order
among them does not matter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastdeploy_core.contracts.small import GrammarMatcher
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import SamplingParams

from .columns import BAD_WORDS, GRAMMAR, MASK, MIN_TOKENS, SamplingColumns, SamplingPlan

logger = logging.getLogger(__name__)

GRAMMAR_FAILED = "grammar_failed"
ALL = np.uint32(0xFFFFFFFF)
ONES = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))

# Generated tokens of a slot, as the host knows them.
OutputTokens = Callable[[int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Forbidden:
    """A set of tokens, ready to be cleared in a mask: words to change, and what stays of them."""

    words: np.ndarray
    keep: np.ndarray

    @classmethod
    def of(cls, token_ids: np.ndarray) -> Forbidden:
        """Several tokens may share a word."""
        words, index = np.unique(token_ids >> 5, return_inverse=True)
        keep = np.full(words.size, ALL, dtype=np.uint32)
        np.bitwise_and.at(keep, index, ~ONES[token_ids & 31])
        return cls(words, keep)

    def clear(self, mask: np.ndarray) -> None:
        """mask: [words] uint32."""
        mask[self.words] &= self.keep


class TokenMasks:
    """Masks of every slot; rows are [ceil(vocabulary / 32)] words, bit set = possible."""

    def __init__(self, columns: SamplingColumns, max_num_seqs: int) -> None:
        self._columns = columns
        self._vocab_size = columns.vocab_size
        self.num_words = (columns.vocab_size + 31) // 32
        self._fixed = np.full((max_num_seqs, self.num_words), ALL, dtype=np.uint32)
        self._ends: list[Forbidden | None] = [None] * max_num_seqs
        self._bad_words: list[list[tuple[np.ndarray, Forbidden]] | None] = [None] * max_num_seqs
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
        several: list[tuple[np.ndarray, Forbidden]] = []
        for word in params.bad_words_token_ids or []:
            ids = np.asarray(word, dtype=np.int64)
            if ids.size == 1:
                Forbidden.of(ids).clear(fixed)
                self._columns.set_flag(slot, MASK)
            elif ids.size:
                several.append((ids[:-1], Forbidden.of(ids[-1:])))
        if several:
            self._bad_words[slot] = several
            self._columns.set_flag(slot, BAD_WORDS)
        if params.min_tokens > 0:
            ends = np.asarray([*eos_token_ids, *(params.stop_token_ids or [])], dtype=np.int64)
            self._ends[slot] = Forbidden.of(ends[(ends >= 0) & (ends < self._vocab_size)])

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
                ends.clear(mask)
        return rows, masks.view(np.int32), errors

    def accept(self, slot: int, token_ids: list[int]) -> bool:
        """Advance the slot's grammar; False when a token does not fit."""
        try:
            return self.matchers[slot].accept(token_ids) == len(token_ids)
        except Exception:  # a grammar plugin's own failure costs its request only
            logger.exception("a grammar matcher failed in accept()")
            return False

    def _grammar(self, slot: int, mask: np.ndarray) -> tuple[bool, str]:
        matcher = self.matchers[slot]
        possible = np.empty(self.num_words, dtype=np.int32)
        try:
            matcher.fill_mask(possible)
            mask &= possible.view(np.uint32)
            return matcher.is_finished(), ""
        except InvalidRequest as error:
            return False, f"invalid_request: {error}"
        except Exception:
            logger.exception("a grammar matcher failed in fill_mask()")
            return False, GRAMMAR_FAILED

    def _forbid_bad_words(self, slot: int, mask: np.ndarray, output: np.ndarray) -> None:
        for prefix, last in self._bad_words[slot] or ():
            if output.size >= prefix.size and (output[-prefix.size :] == prefix).all():
                last.clear(mask)
