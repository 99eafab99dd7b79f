"""`suffix`: drafts what followed the last tokens in this sequence or in past outputs, whichever
match is longer.

Past outputs are kept in two generations of a suffix automaton. When the younger one is full, the
older one is dropped and a new one begun. So memory is bounded and recent outputs remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from fastdeploy_core.contracts.speculative import DrafterContext, HostDraftInput

from .automaton import ROOT, SuffixAutomaton
from .history import TokenHistory
from .ngram import continuation
from .options import SuffixOptions, read_options

# Shorter matches within a sequence say little; past outputs come with probabilities.
_MIN_OWN_MATCH = 2


class _Text:
    """One running sequence."""

    __slots__ = ("history", "num_seen", "old_length", "old_state", "state", "tip")

    def __init__(self, history: TokenHistory, num_seen: int) -> None:
        self.history = history
        self.num_seen = num_seen  # tokens that were added to the automaton or left out of it
        # in the younger generation: end of the text, state of its longest match
        self.tip = self.state = ROOT
        # in the older generation: state and length of the longest match
        self.old_state, self.old_length = ROOT, 0


class SuffixDrafter:
    """One memory per process, shared by all its sequences."""

    name = "suffix"
    contract = (1, 0)
    runs_on: Literal["host"] = "host"

    def __init__(self, context: DrafterContext) -> None:
        self._options = read_options(SuffixOptions, context.options)
        self._texts: dict[int, _Text] = {}
        self._young, self._old = SuffixAutomaton(), SuffixAutomaton()
        self._num_tokens = self._num_texts = 0  # in the younger generation

    def propose(self, batch: HostDraftInput) -> list[list[int]]:
        """The continuation of the longest match."""
        rows = zip(batch.seq_ids, batch.token_ids, batch.max_drafts, strict=True)
        return [self._propose(seq_id, tokens, limit) for seq_id, tokens, limit in rows]

    def observe(self, seq_id: int, drafted: Sequence[int], accepted: int) -> None:
        """Nothing to learn here: output is counted when it is read."""

    def forget(self, seq_id: int) -> None:
        """The sequence's tokens stay in the automaton; its state is dropped."""
        self._texts.pop(seq_id, None)

    def _propose(self, seq_id: int, tokens: np.ndarray, limit: int) -> list[int]:
        options = self._options
        text = self._texts.get(seq_id)
        if text is None:
            history = TokenHistory(
                min(_MIN_OWN_MATCH, options.max_depth), max(_MIN_OWN_MATCH, options.max_depth)
            )
            # A prompt is in its own history; its end is enough here to find what followed it.
            text = _Text(history, max(0, tokens.size - options.max_depth))
            self._texts[seq_id] = text
            self._num_texts += 1
        for token in tokens[text.num_seen :].tolist():
            self._append(text, token)
        text.num_seen = tokens.size
        if not limit:
            return []
        own_length, place = text.history.match(tokens)
        memory, state, length = self._young, text.state, self._young.length[text.state]
        if text.old_length > length:
            memory, state, length = self._old, text.old_state, text.old_length
        length = min(length, options.max_depth)
        if own_length > length:
            return continuation(tokens, place, self._limit(limit, own_length))
        if not length:
            return []
        return memory.draft(state, self._limit(limit, length), options.min_token_prob)

    def _limit(self, limit: int, length: int) -> int:
        return min(limit, max(1, int(self._options.max_spec_factor * length)))

    def _append(self, text: _Text, token: int) -> None:
        young = self._young
        if text.state:
            young.count(text.state, token)
        if text.old_state:
            self._old.count(text.old_state, token)
        text.old_state, text.old_length = self._old.follow(text.old_state, text.old_length, token)
        if not self._has_memory():
            return
        text.tip, text.state = young.append(text.tip, token)
        self._num_tokens += 1
        if self._is_full():
            self._begin_generation()

    def _has_memory(self) -> bool:
        return bool(self._options.max_cached_tokens and self._options.max_cached_requests)

    def _is_full(self) -> bool:
        options = self._options
        most_texts = options.max_cached_requests
        return self._num_tokens * 2 >= options.max_cached_tokens or (
            most_texts > 0 and self._num_texts * 2 > max(most_texts, 2)
        )

    def _begin_generation(self) -> None:
        for text in self._texts.values():
            text.old_state, text.old_length = text.state, self._young.length[text.state]
            text.tip = text.state = ROOT
        self._old, self._young = self._young, SuffixAutomaton()
        self._num_tokens = 0
        self._num_texts = len(self._texts)
