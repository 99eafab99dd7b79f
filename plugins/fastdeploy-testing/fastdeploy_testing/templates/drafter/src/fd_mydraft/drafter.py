"""Drafts the token that most often followed the last one in the same sequence, and so on from
there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from fastdeploy_core.contracts.speculative import DrafterContext, HostDraftInput


class _Followers:
    """What followed each token of one sequence."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.last = -1
        self.counts: dict[int, Counter[int]] = {}

    def read(self, tokens: Sequence[int]) -> None:
        """Take in tokens that are new."""
        for token in tokens:
            if self.last >= 0:
                self.counts.setdefault(self.last, Counter())[token] += 1
            self.last = token


class MyDraftDrafter:
    """Counts pairs of tokens."""

    name = "mydraft"
    contract = (1, 0)
    runs_on: Literal["host"] = "host"

    def __init__(self, context: DrafterContext) -> None:
        self._min_count = int(context.options.get("min_count", 1))
        self._sequences: dict[int, _Followers] = {}

    def propose(self, batch: HostDraftInput) -> list[list[int]]:
        """Up to max_drafts tokens for each row."""
        proposals = []
        for seq_id, tokens, limit in zip(
            batch.seq_ids, batch.token_ids, batch.max_drafts, strict=True
        ):
            known = self._sequences.setdefault(seq_id, _Followers())
            # The array is only lent and only grows: read what is new and keep no reference.
            known.read(tokens[known.num_seen :].tolist())
            known.num_seen = len(tokens)
            proposals.append(self._draft(known, limit))
        return proposals

    def observe(self, seq_id: int, drafted: Sequence[int], accepted: int) -> None:
        """The fate of the last proposal; a method could learn from it."""

    def forget(self, seq_id: int) -> None:
        """The sequence ended or was preempted."""
        self._sequences.pop(seq_id, None)

    def _draft(self, known: _Followers, limit: int) -> list[int]:
        drafts: list[int] = []
        token = known.last
        while len(drafts) < limit and token in known.counts:
            token, count = known.counts[token].most_common(1)[0]
            if count < self._min_count:
                break
            drafts.append(token)
        return drafts
