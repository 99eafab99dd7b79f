"""The state of one sequence in its grammar, whose masks are computed beside the engine's steps.

The library gives the interpreter lock back while it computes. A mask takes microseconds for nearly
every grammar and tens of milliseconds for a hostile one, and no rule of its text tells which. So a
grammar is trusted once its masks have been quick for a while: then they are computed where they are
asked for. Until then threads of this module compute them, and a sequence takes no part in a step
before its mask is there. What its masks cost is bounded for each request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher

from fastdeploy_core.errors import InvalidRequest

QUICK_S = 2e-3  # processor time of a mask that a step may wait for
TRUSTED_AFTER = 8  # quick masks in a row
BUDGET_S = 0.5  # that a request has for masks, of each of which FREE_S count for nothing
FREE_S = 4e-3

# Hostile grammars keep these busy, and only others that are not trusted wait for them.
_threads = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2)), "fd-masks")


class Grammar:
    """What all sequences of one grammar share: the state at its beginning, the first mask, and
    whether it is trusted."""

    def __init__(self, matcher: LLMatcher, num_bits: int) -> None:
        """num_bits: tokens that the tokenizer knows, which may be more than the model has."""
        self.matcher, self.num_words = matcher, (num_bits + 31) // 32
        self.num_quick = 0  # masks since the last slow one
        _, self.first = self.compute(matcher)

    @property
    def is_trusted(self) -> bool:
        """Whether a step may wait for its masks."""
        return self.num_quick >= TRUSTED_AFTER

    def compute(self, matcher: LLMatcher) -> tuple[float, np.ndarray]:
        """(seconds of processor time, [num_words] int32) of one mask; any thread."""
        began, mask = time.thread_time(), np.zeros(self.num_words, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        taken = time.thread_time() - began
        self.num_quick = self.num_quick + 1 if taken < QUICK_S else 0
        return taken, mask


class LLGuidanceMatcher:
    """A BesideMatcher. The library refuses end-of-text tokens after the grammar's end, so they are
    counted here."""

    def __init__(self, grammar: Grammar, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._grammar, self._matcher = grammar, grammar.matcher.deep_copy()
        self._eos_ids = eos_ids
        self._num_ended = 0  # end-of-text tokens accepted after the grammar's end
        self._tail_words = (vocab_size + 31) // 32
        self._tail_mask = np.int32(-1)
        if vocab_size % 32:
            self._tail_mask = np.int32((1 << (vocab_size % 32)) - 1)
        self._cost_s = 0.0  # the first mask is made once for all sequences
        # The mask of now: as it was computed, or on its way, or neither.
        self._mask: np.ndarray | None = grammar.first
        self._job: Future[tuple[float, np.ndarray]] | None = None

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by tokens; returns how many were accepted."""
        self._move()
        tokens = [int(t) for t in token_ids]
        taken = 0
        if not self._num_ended and not self._matcher.is_stopped():
            taken = self._matcher.try_consume_tokens(tokens)
        while taken < len(tokens) and tokens[taken] in self._eos_ids and self.is_finished():
            self._num_ended += 1
            taken += 1
        return taken

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""
        self._move()
        past_end = min(num_tokens, self._num_ended)
        self._num_ended -= past_end
        if num_tokens > past_end and not self._matcher.rollback(num_tokens - past_end):
            raise InvalidRequest("the grammar cannot go back that far")

    def begin_mask(self) -> None:
        """Compute the mask in another thread, unless the grammar is trusted."""
        is_there = self._num_ended or self._mask is not None or self._job is not None
        if not is_there and not self._grammar.is_trusted:
            self._job = _threads.submit(self._grammar.compute, self._matcher)

    def is_ready(self) -> bool | None:
        """Whether the mask is there; None: the grammar is trusted. Without a job `fill_mask`
        computes it."""
        job = self._job
        if self._grammar.is_trusted and job is None:
            return None
        return job is None or job.done()

    def fill_mask(self, mask: np.ndarray) -> None:
        """Write the mask of possible tokens. mask: [ceil(vocab_size / 32)] int32. InvalidRequest
        when the grammar is too complex at this point."""
        if self._num_ended:
            mask[:] = 0
            self._allow_eos(mask)
            return
        if self._mask is None:
            job, self._job = self._job, None
            taken_s, self._mask = job.result() if job else self._grammar.compute(self._matcher)
            self._charge(taken_s)
        if self._cost_s > BUDGET_S:
            raise InvalidRequest(
                "the grammar takes too long at each token; make it simpler or less ambiguous"
            )
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar became too complex: {self.error()}")
        mask[:] = self._mask[: self._tail_words]
        mask[-1] &= self._tail_mask

    def is_finished(self) -> bool:
        """Whether only the end of text can follow."""
        return self._num_ended > 0 or (self._matcher.is_stopped() and not self._matcher.is_error())

    def error(self) -> str:
        """The library's reason in one short line, or an empty text."""
        return " ".join(self._matcher.get_error().split("<")[0].split())[:200]

    def _move(self) -> None:
        """The state is to change: nobody may be computing its mask, which nobody wants any more."""
        if self._job is not None:
            self._charge(self._job.result()[0])
        self._mask = self._job = None

    def _charge(self, taken_s: float) -> None:
        self._cost_s += max(0.0, taken_s - FREE_S)

    def _allow_eos(self, mask: np.ndarray) -> None:
        bits = mask.view(np.uint32)
        for token in self._eos_ids:
            if token // 32 < bits.size:
                bits[token // 32] |= np.uint32(1 << (token % 32))
