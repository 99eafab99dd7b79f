"""Memory that recorded steps read and write: at the same addresses in every replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastdeploy_core.contracts.attention import AttentionBatch

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor


class DraftsWithResults(NamedTuple):
    """What the host is told of a recorded step that drafts: its results, then drafts for the next one."""

    values: Tensor  # [size, width + number] int64
    width: int


class StepBuffers:
    """What a step of up to `num_tokens` tokens in `num_rows` rows is given; smaller ones use its
    beginning. longest: tokens of a row, with those of the step."""

    def __init__(
        self, device: DeviceBackend, num_tokens: int, num_rows: int, max_blocks: int, longest: int
    ) -> None:
        xp = self._xp = device.xp
        self._device, self._max_blocks, self._longest = device, max_blocks, longest
        self.num_rows = num_rows
        self.input_ids, self.positions = self.zeros(num_tokens), self.zeros(num_tokens)
        self.slot_mapping = self.zeros(num_tokens) - 1
        self.seq_lens = self.zeros(num_rows, dtype=xp.int32)
        self.tables = self.zeros(num_rows, max_blocks, dtype=xp.int32)

    def zeros(self, *shape: int, dtype: object = None) -> Tensor:
        """int64 unless said otherwise."""
        xp = self._xp
        return xp.zeros(shape, dtype=dtype or xp.int64, device=self._device.device)

    def attention(
        self,
        rows: int,
        tokens: int,
        starts: np.ndarray,
        starts_dev: Tensor,
        tokens_per_row: int = 0,
    ) -> AttentionBatch:
        """The batch of a recorded step; the host's arrays are upper bounds."""
        return AttentionBatch(
            num_seqs=rows,
            num_tokens=tokens,
            cu_seqlens_q=starts,
            seq_lens=np.full(rows, self._longest, dtype=np.int32),
            block_tables=np.zeros((rows, self._max_blocks), dtype=np.int32),
            cu_seqlens_q_dev=starts_dev,
            seq_lens_dev=self.seq_lens[:rows],
            block_tables_dev=self.tables[:rows],
            slot_mapping=self.slot_mapping[:tokens],
            positions=self.positions[:tokens],
            tokens_per_row=tokens_per_row,
            is_exact=False,
        )


class DecodeBuffers(StepBuffers):
    """Of decode steps with `width` tokens per row, and what they leave for the host."""

    def __init__(
        self, device: DeviceBackend, max_rows: int, width: int, max_blocks: int, longest: int
    ) -> None:
        super().__init__(device, max_rows * width, max_rows, max_blocks, longest)
        self._width = width
        self._offsets = np.arange(max_rows + 1, dtype=np.int32) * np.int32(width)
        self._offsets_dev = device.to_device(self._offsets.copy())
        self.results = self.zeros(max_rows, width)
        # For drafters, where the step itself does not record them: what was drawn, and where each row's last
        # kept token stands in it.
        self.drawn, self.last = self.zeros(max_rows * width), self.zeros(max_rows)
        self._results_of: dict[int, Tensor] = {}

    def results_of(self, num_rows: int) -> Tensor:
        """Those of the first rows; the same tensor each time."""
        found = self._results_of.get(num_rows)
        if found is None:
            found = self._results_of[num_rows] = self.results[:num_rows]
        return found

    def drawn_of(self, size: int) -> Tensor:
        """Of the first `size` rows."""
        return self.drawn[: size * self._width]

    def batch(self, size: int) -> AttentionBatch:
        """The attention batch of `size` rows."""
        starts, starts_dev = self._offsets[: size + 1], self._offsets_dev[: size + 1]
        return self.attention(size, size * self._width, starts, starts_dev, self._width)


class PromptBuffers(StepBuffers):
    """Of steps whose rows have any number of tokens."""

    def __init__(
        self, device: DeviceBackend, num_tokens: int, num_rows: int, max_blocks: int, longest: int
    ) -> None:
        super().__init__(device, num_tokens, num_rows, max_blocks, longest)
        self.starts = self.zeros(num_rows + 1, dtype=self._xp.int32)
        self.read_tokens = self.zeros(num_rows)  # ForwardContext.rows
        # For drafters, behind the step: see DraftBatch.
        self.next_ids, self.last = self.zeros(num_tokens), self.zeros(num_rows)

    def clear(self) -> None:
        """New caches: no number of a former step stays, so that one which runs now writes nothing."""
        for numbers in (self.starts, self.seq_lens, self.tables, self.read_tokens, self.last):
            numbers.zero_()
        self.slot_mapping.copy_(self._xp.zeros_like(self.slot_mapping) - 1)

    def batch(self, size: int) -> AttentionBatch:
        """The attention batch of up to `size` tokens."""
        rows = min(self.num_rows, size)
        starts = np.full(rows + 1, size, dtype=np.int32)
        starts[0] = 0
        return self.attention(rows, size, starts, self.starts[: rows + 1])

    def take(self, batch: AttentionBatch, input_ids: Tensor, size: int) -> None:
        """Queue the copies of a step's batch; what is behind it becomes padding."""
        tokens, rows = batch.num_tokens, batch.num_seqs
        last = min(self.num_rows, size)
        self.input_ids[:tokens] = input_ids
        self.positions[:tokens] = batch.positions
        self.slot_mapping[:tokens] = batch.slot_mapping
        if tokens < size:
            self.input_ids[tokens:size] = 0
            self.positions[tokens:size] = 0
            self.slot_mapping[tokens:size] = -1
        self.starts[: rows + 1] = batch.cu_seqlens_q_dev
        self.seq_lens[:rows] = batch.seq_lens_dev
        if rows < last:
            self.starts[rows + 1 : last + 1] = tokens
            self.seq_lens[rows:last] = 0
        width = int(batch.block_tables_dev.shape[1])
        self.tables[:rows, :width] = batch.block_tables_dev

    def take_drawn(self, next_ids: Tensor, last: Tensor) -> None:
        """Queue the copies of what a drafter is told of the step that was taken last."""
        tokens, rows = int(next_ids.shape[0]), int(last.shape[0])
        self.next_ids[:tokens] = next_ids
        self.last[:rows] = last
        if rows < self.num_rows:
            self.last[rows:] = 0  # of a larger step before
