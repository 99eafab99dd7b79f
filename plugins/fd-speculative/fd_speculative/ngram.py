"""`ngram_match`: drafts what followed the last tokens at an earlier occurrence in prompt or
output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from fastdeploy_core.contracts.speculative import DraftBatch, DrafterContext, HostDraftInput
from fastdeploy_core.errors import ConfigError

from .history import TokenHistory
from .options import NgramOptions, read_options

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor


class DeviceNgramDrafter:
    """Searches a sequence's tokens on the device, so that no step waits for the host."""

    name = "ngram_match"
    contract = (1, 0)
    runs_on: Literal["device"] = "device"
    reads_history = True

    def __init__(self, context: DrafterContext) -> None:
        options = read_options(NgramOptions, context.options)
        if context.kernels is None:
            raise ConfigError("n-grams on the device need its kernels (DrafterContext.kernels)")
        self._sizes = (options.min_ngram_size, options.max_ngram_size)
        self._match = context.kernels["match_ngrams"]

    def propose(self, batch: DraftBatch) -> Tensor:
        """What followed the earlier occurrence of the longest end of each row."""
        rows, known = batch.history_rows, batch.num_known
        found: Tensor = self._match(batch.history, rows, known, *self._sizes, batch.max_drafts)
        return found

    def observe(self, seq_id: int, drafted: Sequence[int], accepted: int) -> None:
        """Drafters on the device are not told."""

    def forget(self, seq_id: int) -> None:
        """The core owns the histories."""


class NgramDrafter:
    """Needs no weights and no device; keeps an index of every sequence."""

    name = "ngram_match"
    contract = (1, 0)
    runs_on: Literal["host"] = "host"
    on_device = DeviceNgramDrafter

    def __init__(self, context: DrafterContext) -> None:
        self._options = read_options(NgramOptions, context.options)
        self._histories: dict[int, TokenHistory] = {}

    def propose(self, batch: HostDraftInput) -> list[list[int]]:
        """The continuation of the longest match."""
        histories, options = self._histories, self._options
        proposals = []
        ahead = batch.drafts or [()] * len(batch.seq_ids)
        for seq_id, tokens, limit, before in zip(
            batch.seq_ids, batch.token_ids, batch.max_drafts, ahead, strict=True
        ):
            history = histories.get(seq_id)
            if history is None:
                history = TokenHistory(options.min_ngram_size, options.max_ngram_size)
                histories[seq_id] = history
            length, place = history.match(tokens, before) if limit else (0, 0)
            if length and before:
                tokens = np.concatenate((tokens, np.asarray(before, dtype=tokens.dtype)))
            proposals.append(continuation(tokens, place, limit) if length else [])
        return proposals

    def observe(self, seq_id: int, drafted: Sequence[int], accepted: int) -> None:
        """Nothing to learn."""

    def forget(self, seq_id: int) -> None:
        """Drop the sequence's index."""
        self._histories.pop(seq_id, None)


def continuation(tokens: np.ndarray, place: int, limit: int) -> list[int]:
    """The tokens from `place` on. After the newest token the copy continues with itself, so that a
    short period repeats."""
    found: list[int] = tokens[place : place + limit].tolist()
    period = tokens.size - place
    while len(found) < limit:
        found.append(found[len(found) - period])
    return found
