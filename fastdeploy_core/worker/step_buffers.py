"""Memory that recorded steps read and write: at the same addresses in every replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.contracts.attention import AttentionBatch

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor


class StepBuffers:
    """Memory that every recorded step of one width reads and writes; smaller ones use its beginning."""

    def __init__(
        self, device: DeviceBackend, max_rows: int, width: int, max_blocks: int, longest: int
    ) -> None:
        xp = device.xp
        num_tokens = max_rows * width
        self._width, self._max_blocks, self._longest = width, max_blocks, longest

        def zeros(*shape: int, dtype: object = xp.int64) -> Tensor:
            return xp.zeros(shape, dtype=dtype, device=device.device)

        self.input_ids, self._positions = zeros(num_tokens), zeros(num_tokens)
        self._slot_mapping = zeros(num_tokens) - 1
        self._seq_lens = zeros(max_rows, dtype=xp.int32)
        self._block_tables = zeros(max_rows, max_blocks, dtype=xp.int32)
        self._offsets = np.arange(max_rows + 1, dtype=np.int32) * np.int32(width)
        self._offsets_dev = device.to_device(self._offsets.copy())
        self.results = zeros(max_rows, width)

    def batch(self, size: int) -> AttentionBatch:
        """The attention batch of `size` rows; the host's arrays are upper bounds."""
        num_tokens = size * self._width
        return AttentionBatch(
            num_seqs=size,
            num_tokens=num_tokens,
            cu_seqlens_q=self._offsets[: size + 1],
            seq_lens=np.full(size, self._longest, dtype=np.int32),
            block_tables=np.zeros((size, self._max_blocks), dtype=np.int32),
            cu_seqlens_q_dev=self._offsets_dev[: size + 1],
            seq_lens_dev=self._seq_lens[:size],
            block_tables_dev=self._block_tables[:size],
            slot_mapping=self._slot_mapping[:num_tokens],
            positions=self._positions[:num_tokens],
            tokens_per_row=self._width,
            is_exact=False,
        )
