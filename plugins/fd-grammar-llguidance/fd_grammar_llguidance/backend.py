"""Driver `llguidance`.

Its parser is lazy and bounded by fuel limits, so building a matcher in the worker is cheap; a
matcher that runs out of fuel only ends its own request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.types import StructuredOutputsParams

from .convert import to_grammar
from .limits import Limits, check, refuse

# Matchers of recent grammars are kept and copied, which takes microseconds.
MAX_CACHED_MATCHERS = 64
MAX_CACHED_BYTES = 1024 * 1024


class LLGuidanceMatcher:
    """One sequence's state. The library refuses end-of-text tokens after the grammar's end, so they
    are counted here."""

    def __init__(
        self, matcher: LLMatcher, num_bits: int, vocab_size: int, eos_ids: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._num_ended = 0  # end-of-text tokens accepted after the grammar's end
        self._tail_words = (vocab_size + 31) // 32
        # The tokenizer may know more tokens than the model has logits.
        self._wide = np.zeros((num_bits + 31) // 32, dtype=np.int32)
        self._tail_mask = np.int32(-1)
        if vocab_size % 32:
            self._tail_mask = np.int32((1 << (vocab_size % 32)) - 1)

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by tokens; returns how many were accepted."""
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
        past_end = min(num_tokens, self._num_ended)
        self._num_ended -= past_end
        if num_tokens > past_end and not self._matcher.rollback(num_tokens - past_end):
            raise InvalidRequest("the grammar cannot go back that far")

    def fill_mask(self, mask: np.ndarray) -> None:
        """Write the mask of possible tokens. mask: [ceil(vocab_size / 32)] int32. InvalidRequest
        when the grammar is too complex at this point."""
        if self._num_ended:
            mask[:] = 0
            self._allow_eos(mask)
            return
        wide = self._wide
        self._matcher.unsafe_compute_mask_ptr(wide.ctypes.data, wide.nbytes)
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar became too complex: {self.error()}")
        mask[:] = wide[: self._tail_words]
        mask[-1] &= self._tail_mask

    def is_finished(self) -> bool:
        """Whether only the end of text can follow."""
        return self._num_ended > 0 or (self._matcher.is_stopped() and not self._matcher.is_error())

    def error(self) -> str:
        """The library's reason in one short line, or an empty text."""
        return " ".join(self._matcher.get_error().split("<")[0].split())[:200]

    def _allow_eos(self, mask: np.ndarray) -> None:
        bits = mask.view(np.uint32)
        for token in self._eos_ids:
            if token // 32 < bits.size:
                bits[token // 32] |= np.uint32(1 << (token % 32))


class LLGuidanceBackend:
    """Constructed with a tokenizer.json (its path or its text), in front ends and worker."""

    name = "llguidance"
    contract = (1, 0)

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        text = tokenizer_json
        if not text.lstrip().startswith("{"):
            text = Path(tokenizer_json).read_text(encoding="utf-8")
        eos = [int(t) for t in eos_token_ids] or None
        try:
            self._tokenizer = LLTokenizer(text, eos_token=eos)
            if vocab_size > self._tokenizer.vocab_size:
                self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
        except ValueError as error:
            raise ConfigError(
                f"structured outputs cannot read this tokenizer.json: {error}; structured outputs "
                "need a fast (tokenizer.json) tokenizer"
            ) from error
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(self._tokenizer.eos_tokens)
        # Schemas of hundreds of properties need some 1,000 items. Up to the default of 50,000 an
        # ambiguous grammar takes 50 ms for each mask.
        self._limits = LLParserLimits(
            verbose_errors=False, max_lexer_states=50_000, step_max_items=10_000
        )
        self._pristine: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._pristine_bytes = 0

    def compile(self, params: StructuredOutputsParams, options: Mapping[str, Any]) -> bytes:
        """Check and convert a constraint; run this in a process that may be killed."""
        source = check(params, Limits.of(options))
        grammar = to_grammar(params, source, options)
        matcher = self._build(grammar)
        # The first mask shows errors that construction leaves for later: grammars that match
        # nothing, or that branch too widely.
        if not matcher.is_error():
            mask = np.zeros((self._tokenizer.vocab_size + 31) // 32, dtype=np.int32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if not matcher.is_error() and not mask.any():
                raise refuse(params.kind, "nothing can match it")
        if matcher.is_error():
            why = " ".join(matcher.get_error().split("<")[0].split())[:300]
            raise refuse(params.kind, why or "it is too complex")
        return grammar.encode()

    def matcher(self, compiled: bytes) -> LLGuidanceMatcher:
        """A matcher at the beginning of the grammar."""
        pristine = self._pristine.get(compiled)
        if pristine is None:
            pristine = self._build(compiled.decode())
            if pristine.is_error():
                raise InvalidRequest("the grammar cannot be built again in the worker")
            self._keep(compiled, pristine)
        else:
            self._pristine.move_to_end(compiled)
        return LLGuidanceMatcher(
            pristine.deep_copy(), self._tokenizer.vocab_size, self._vocab_size, self._eos_ids
        )

    def _build(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, limits=self._limits, log_level=0)

    def _keep(self, compiled: bytes, matcher: LLMatcher) -> None:
        self._pristine[compiled] = matcher
        self._pristine_bytes += len(compiled)
        while len(self._pristine) > MAX_CACHED_MATCHERS or (
            self._pristine_bytes > MAX_CACHED_BYTES and len(self._pristine) > 1
        ):
            dropped, _ = self._pristine.popitem(last=False)
            self._pristine_bytes -= len(dropped)


__all__ = ["LLGuidanceBackend", "LLGuidanceMatcher"]
