"""Which tokens are forbidden, as one bit per token.

allowed_token_ids, bad words, min_tokens and grammars all only forbid tokens. Penalties and biases
never allow a forbidden token again. So one mask joins them all, is applied once, and their order
does not matter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from fastdeploy_core.contracts.small import BesideMatcher, GrammarMatcher
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import SamplingParams

from .columns import BAD_WORDS, GRAMMAR, MASK, MIN_TOKENS, SamplingColumns, SamplingPlan

logger = logging.getLogger(__name__)

GRAMMAR_FAILED = "grammar_failed"
ALL = np.uint32(0xFFFFFFFF)
ONES = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))

# Generated tokens of a slot, as the host knows them.
OutputTokens = Callable[[int], np.ndarray]


def note_failure(error: BaseException, what: str) -> None:
    """Log what a plugin's code raised, its own exit or a library's panic among it: that ends one
    request. What the operator interrupts goes on."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    logger.error(what, exc_info=error)


class Histories:
    """The tokens before each row of a plan: generated tokens, then the drafts before its position.

    `drafts`: [rows] int64, the draft that a row's sampled token is compared with, -1 after the last
    one.
    """

    def __init__(
        self, plan: SamplingPlan, output_tokens: OutputTokens, drafts: np.ndarray | None
    ) -> None:
        self._plan, self._output_tokens, self._drafts = plan, output_tokens, drafts

    def __call__(self, row: int) -> np.ndarray:
        """Generated tokens before the row's position; after a missing draft, those up to it."""
        output = self._output_tokens(int(self._plan.slots[row]))
        if self._drafts is None or not self._plan.depths[row]:
            return output
        before = self._drafts[row - self._plan.depths[row] : row]
        return np.concatenate((output, before[before >= 0].astype(output.dtype)))

    def draft_before(self, row: int) -> int:
        """The draft directly before the row's position; -1: none."""
        return -1 if self._drafts is None else int(self._drafts[row - 1])


@dataclass(frozen=True, slots=True)
class Forbidden:
    """A set of tokens in the form that clears them in a mask: words to change, bits that stay."""

    words: np.ndarray
    keep: np.ndarray

    @classmethod
    def of(cls, token_ids: np.ndarray) -> Forbidden:
        """Build the set; several tokens may share a word."""
        words, index = np.unique(token_ids >> 5, return_inverse=True)
        keep = np.full(words.size, ALL, dtype=np.uint32)
        np.bitwise_and.at(keep, index, ~ONES[token_ids & 31])
        return cls(words, keep)

    def clear(self, mask: np.ndarray) -> None:
        """Clear the tokens. mask: [words] uint32."""
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
        self.matchers: dict[int, GrammarMatcher] = {}  # by slot; the model runner fills it
        self._beside: dict[int, tuple[int, BesideMatcher]] = {}  # of them, with their seq_ids

    def add(self, slot: int, params: SamplingParams, eos_token_ids: list[int]) -> None:
        """Add one sequence's fixed constraints. Token ids outside the vocabulary are refused if the
        client named them, ignored if the model did."""
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

    def add_matcher(self, slot: int, seq_id: int, matcher: GrammarMatcher) -> None:
        """Bind the slot's sequence to a grammar."""
        self.matchers[slot] = matcher
        if hasattr(matcher, "begin_mask"):  # a BesideMatcher, after thinking or not
            self._beside[slot] = (seq_id, cast("BesideMatcher", matcher))
        self._columns.set_flag(slot, GRAMMAR)

    def reset(self, slot: int) -> None:
        """Reset to the state of an unused slot."""
        self._fixed[slot] = ALL
        self._ends[slot] = self._bad_words[slot] = None
        self.matchers.pop(slot, None)
        self._beside.pop(slot, None)

    def build(
        self, plan: SamplingPlan, num_output: np.ndarray, histories: Histories
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
        finished: dict[int, bool] = {}
        if plan.flags & GRAMMAR:
            finished = self._grammars(plan, rows, masks, histories, errors)
        for index, row in enumerate(rows.tolist()):
            slot = int(plan.slots[row])
            mask = masks[index]
            if wanted[row] & BAD_WORDS:
                self._forbid_bad_words(slot, mask, histories(row))
            ends = self._ends[slot]
            # After its end a grammar allows nothing but the end of text, even below min_tokens.
            if below[row] and ends is not None and not finished.get(row, False):
                ends.clear(mask)
        return rows, masks.view(np.int32), errors

    def accept(self, slot: int, token_ids: list[int]) -> bool:
        """Advance the slot's grammar; False when a token does not fit."""
        try:
            return self.matchers[slot].accept(token_ids) == len(token_ids)
        except BaseException as error:  # of a grammar plugin: it ends its request only
            note_failure(error, "a grammar matcher failed in accept()")
            return False

    def begin(self, slot: int) -> None:
        """The slot's next mask may be computed beside the steps."""
        if slot in self._beside:
            self._ask(slot, self._beside[slot][1].begin_mask)

    def most_steps(self) -> dict[int, int]:
        """By seq_id, steps that may be in flight: 0 until the next mask is there, then 1."""
        beside = [*self._beside.items()]
        ready = {seq_id: self._ask(slot, one.is_ready) for slot, (seq_id, one) in beside}
        return {seq_id: int(made) for seq_id, made in ready.items() if made is not None}

    def _ask(self, slot: int, ask: Callable[[], bool | None]) -> bool | None:
        try:
            return ask()
        except BaseException as error:  # from now on its masks are computed in the steps
            note_failure(error, "a grammar matcher failed beside the steps")
            self._beside.pop(slot, None)
            return None

    def allowed(self, slot: int, token_ids: list[int]) -> int:
        """How many of these tokens the slot's grammar could accept now; its state stays."""
        matcher = self.matchers[slot]
        try:
            taken = matcher.accept(token_ids)
            matcher.rollback(taken)
        except BaseException as error:
            note_failure(error, "a grammar matcher failed over drafts")
            return 0
        self.begin(slot)
        return taken

    def _grammars(
        self,
        plan: SamplingPlan,
        rows: np.ndarray,
        masks: np.ndarray,
        histories: Histories,
        errors: dict[int, str],
    ) -> dict[int, bool]:
        """Narrow the masks of rows with a grammar, each after the drafts before it; returns which
        rows come after the grammar's end. A row after a draft that does not fit keeps its mask: the
        draft will be rejected, and the row with it."""
        finished: dict[int, bool] = {}
        num_ahead = 0  # drafts that the matcher has accepted
        fits = True
        bound = [(i, row) for i, row in enumerate(rows.tolist()) if plan.row_flags[row] & GRAMMAR]
        for (index, row), after in zip(bound, [*bound[1:], (0, -1)], strict=True):
            slot = int(plan.slots[row])
            if plan.depths[row]:
                draft = histories.draft_before(row)
                fits = fits and draft >= 0 and self.accept(slot, [draft])
                num_ahead += fits
            if fits:
                finished[row], error = self._grammar(slot, masks[index])
                if error:
                    errors[row] = error
            if after[1] < 0 or not plan.depths[after[1]]:
                if num_ahead:
                    self._roll_back(slot, row, num_ahead, errors)
                num_ahead, fits = 0, True
        return finished

    def _roll_back(self, slot: int, row: int, num_tokens: int, errors: dict[int, str]) -> None:
        try:
            self.matchers[slot].rollback(num_tokens)
        except BaseException as error:
            note_failure(error, "a grammar matcher failed in rollback()")
            errors[row - num_tokens] = GRAMMAR_FAILED

    def _grammar(self, slot: int, mask: np.ndarray) -> tuple[bool, str]:
        matcher = self.matchers[slot]
        possible = np.empty(self.num_words, dtype=np.int32)
        try:
            matcher.fill_mask(possible)
            mask &= possible.view(np.uint32)
            return matcher.is_finished(), ""
        except InvalidRequest as error:
            return False, f"InvalidRequest:{error.param or ''}: {error}"
        except BaseException as error:
            note_failure(error, "a grammar matcher failed in fill_mask()")
            return False, GRAMMAR_FAILED

    def _forbid_bad_words(self, slot: int, mask: np.ndarray, output: np.ndarray) -> None:
        for prefix, last in self._bad_words[slot] or ():
            if output.size >= prefix.size and (output[-prefix.size :] == prefix).all():
                last.clear(mask)
