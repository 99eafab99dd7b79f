"""Counts of generated tokens and marks of prompt tokens, on the device, for rows with penalties.

The tables are as wide as the vocabulary, so they are allocated when the first such sequence
arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor


class PenaltyTables:
    """output_counts [slots, vocabulary] int32 and prompt_seen [slots, vocabulary] bool."""

    def __init__(self, device: DeviceBackend, max_num_seqs: int, vocab_size: int) -> None:
        self._device, self._xp = device, device.xp
        self._shape = (max_num_seqs, vocab_size)
        self._tables: tuple[Tensor, Tensor] | None = None
        self._used: set[int] = set()

    @staticmethod
    def num_bytes(max_num_seqs: int, vocab_size: int) -> int:
        """Size of the tables once they are allocated."""
        return max_num_seqs * vocab_size * 5

    def add(self, slot: int, prompt: np.ndarray, output: np.ndarray) -> None:
        """Add a sequence with penalties; `output` is not empty if the sequence was preempted."""
        vocab_size = self._shape[1]
        counts = np.bincount(output, minlength=vocab_size)[:vocab_size].astype(np.int32)
        seen = np.zeros(vocab_size, dtype=bool)
        seen[prompt[prompt < vocab_size]] = True
        output_counts, prompt_seen = self.tables()
        output_counts[slot : slot + 1] = self._device.to_device(counts[None])
        prompt_seen[slot : slot + 1] = self._device.to_device(seen[None])
        self._used.add(slot)

    def tables(self) -> tuple[Tensor, Tensor]:
        """(output_counts, prompt_seen) of all slots; allocated by the first call."""
        if self._tables is None:
            xp, device = self._xp, self._device.device
            self._tables = (
                xp.zeros(self._shape, dtype=xp.int32, device=device),
                xp.zeros(self._shape, dtype=xp.bool, device=device),
            )
        return self._tables

    def rows(self, slots_dev: Tensor) -> tuple[Tensor, Tensor]:
        """(output_counts, prompt_seen) of these slots."""
        output_counts, prompt_seen = self.tables()
        select = self._xp.index_select
        return select(output_counts, 0, slots_dev), select(prompt_seen, 0, slots_dev)

    def count(self, first_flat: Tensor, token_ids: Tensor, kept: Tensor | None = None) -> None:
        """Add each row's token to the counts. first_flat: [rows] int64, slot * vocabulary size;
        kept: [rows] bool, False for tokens after a rejected draft."""
        xp = self._xp
        if kept is None:
            more = xp.ones(token_ids.shape, dtype=xp.int32, device=self._device.device)
        else:
            more = kept.to(xp.int32)
        xp.index_add_(self.tables()[0].view(-1), 0, first_flat + token_ids, more)

    def add_drafts(self, output_counts: Tensor, base: Tensor, drafts: Tensor) -> None:
        """Count drafts into rows that `rows` returned. base: [n] int64, row * vocabulary size;
        drafts [n] int64, -1: none."""
        xp = self._xp
        more = (drafts >= 0).to(xp.int32)
        xp.index_add_(output_counts.view(-1), 0, base + xp.clamp(drafts, 0, None), more)

    def reset(self, slot: int) -> None:
        """Reset to the state of an unused slot."""
        if slot in self._used:
            for table in self.tables():
                table[slot : slot + 1] = 0
            self._used.discard(slot)
