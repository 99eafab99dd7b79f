"""Driver `llguidance`.

Its parser is lazy and bounded by fuel limits, so building a matcher in the worker takes
milliseconds; a matcher that runs out of fuel only ends its own request.
"""

from __future__ import annotations

import threading
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
from .matcher import Grammar, LLGuidanceMatcher

# Recent grammars are kept; what a sequence needs of one is copied, which takes microseconds.
MAX_CACHED = 64
MAX_CACHED_BYTES = 1024 * 1024


class LLGuidanceBackend:
    """Constructed with the path of a tokenizer.json, in front ends and worker."""

    name = "llguidance"
    contract = (1, 5)

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
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
        self._grammars: OrderedDict[bytes, Grammar] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams, options: Mapping[str, Any]) -> bytes:
        """Check and convert a constraint; run this in a process that may be killed."""
        source = check(params, Limits.of(options))
        grammar = to_grammar(params, source, options, self._tokenizer)
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
        with self._lock:
            grammar = self._grammars.get(compiled)
            if grammar is not None:
                self._grammars.move_to_end(compiled)
        if grammar is None:
            matcher = self._build(compiled.decode())
            if matcher.is_error():
                raise InvalidRequest("the grammar cannot be built again in the worker")
            grammar = Grammar(matcher, self._tokenizer.vocab_size)
            with self._lock:
                self._keep(compiled, grammar)
        return LLGuidanceMatcher(grammar, self._vocab_size, self._eos_ids)

    def _build(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, limits=self._limits, log_level=0)

    def _keep(self, compiled: bytes, grammar: Grammar) -> None:
        if compiled not in self._grammars:
            self._num_bytes += len(compiled)
        self._grammars[compiled] = grammar
        while len(self._grammars) > MAX_CACHED or (
            self._num_bytes > MAX_CACHED_BYTES and len(self._grammars) > 1
        ):
            dropped, _ = self._grammars.popitem(last=False)
            self._num_bytes -= len(dropped)


__all__ = ["LLGuidanceBackend", "LLGuidanceMatcher"]
