"""Recorded steps of prompts, and of prompts beside decodes: the forward pass of up to so many tokens.

A model of small layers computes a short prompt faster than the host can queue its kernels. Such steps are
padded to the next size of a ladder and replayed: what differs between them lies in buffers on the device.
Logits and the draw stay outside; step_graphs.py owns the recordings of decode steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.contracts.attention import AttentionBatch
from fastdeploy_core.errors import ResourceError, WorkerError
from fastdeploy_core.layers.context import ForwardContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastdeploy_core.contracts.device import CapturedGraph, DeviceBackend
    from fastdeploy_core.contracts.small import CausalLM
    from fastdeploy_core.tensor import Tensor

    from .loader import LoadedModel
    from .step_graphs import StepGraphs
    from .step_rows import StepRows

# A recording of more than FEW_TOKENS is used if at least this share of it is tokens: padding is computed.
LEAST_SHARE, FEW_TOKENS = 0.75, 2048


class PromptBuffers:
    """Memory that all recorded steps read; smaller ones use its beginning."""

    def __init__(
        self, device: DeviceBackend, num_tokens: int, num_rows: int, max_blocks: int, longest: int
    ) -> None:
        xp = self._xp = device.xp
        self._max_blocks, self._longest, self.num_rows = max_blocks, longest, num_rows

        def zeros(*shape: int, dtype: object = xp.int64) -> Tensor:
            return xp.zeros(shape, dtype=dtype, device=device.device)

        self.input_ids, self.positions = zeros(num_tokens), zeros(num_tokens)
        self.slot_mapping = zeros(num_tokens) - 1
        self.starts = zeros(num_rows + 1, dtype=xp.int32)
        self.seq_lens = zeros(num_rows, dtype=xp.int32)
        self.tables = zeros(num_rows, max_blocks, dtype=xp.int32)

    def clear(self) -> None:
        """New caches: no number of a former step stays, so that one which runs now writes nothing."""
        for numbers in (self.starts, self.seq_lens, self.tables):
            numbers.zero_()
        self.slot_mapping.copy_(self._xp.zeros_like(self.slot_mapping) - 1)

    def batch(self, size: int) -> AttentionBatch:
        """The attention batch of up to `size` tokens; the host's arrays are upper bounds."""
        rows = min(self.num_rows, size)
        starts = np.full(rows + 1, size, dtype=np.int32)
        starts[0] = 0
        return AttentionBatch(
            num_seqs=rows,
            num_tokens=size,
            cu_seqlens_q=starts,
            seq_lens=np.full(rows, self._longest, dtype=np.int32),
            block_tables=np.zeros((rows, self._max_blocks), dtype=np.int32),
            cu_seqlens_q_dev=self.starts[: rows + 1],
            seq_lens_dev=self.seq_lens[:rows],
            block_tables_dev=self.tables[:rows],
            slot_mapping=self.slot_mapping[:size],
            positions=self.positions[:size],
            is_exact=False,
        )

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


class RecordedPrompt:
    """The forward pass of up to `size` tokens."""

    def __init__(self, graphs: PromptGraphs, size: int) -> None:
        self.size, self._graphs = size, graphs
        self._batch = graphs.buffers.batch(size)
        self._forward: CapturedGraph | None = None
        self._context: ForwardContext | None = None
        self._hidden: Tensor = None  # [size, hidden]; stays until the next replay of any step

    def record(self, beside: CapturedGraph | None) -> CapturedGraph:
        """Run once to get ready, then record; the memory of `beside` is used again."""
        self._compute()
        self._forward = self._graphs.device.capture(self._compute, beside)
        return self._forward

    def run(self, batch: AttentionBatch, input_ids: Tensor) -> tuple[ForwardContext, Tensor]:
        """Queue a step: what its layers were given, and the hidden states of its tokens."""
        assert self._forward is not None and self._context is not None
        self._graphs.buffers.take(batch, input_ids, self.size)
        self._forward.replay()
        return self._context, self._hidden[: batch.num_tokens]

    def _compute(self) -> None:
        graphs, batch, buffers = self._graphs, self._batch, self._graphs.buffers
        self._context = graphs.context(batch)
        input_ids = buffers.input_ids[: self.size]
        self._hidden = graphs.model.forward(input_ids, batch.positions, self._context)


class PromptGraphs:
    """All recorded steps of prompts of one rank; `context` makes what layers need of a batch."""

    def __init__(
        self,
        device: DeviceBackend,
        model: CausalLM,
        context: Callable[[AttentionBatch], ForwardContext],
        sizes: tuple[int, ...],
        *,
        max_num_seqs: int,
        max_blocks: int,
        max_model_len: int,
    ) -> None:
        self.device, self.model, self.context, self.sizes = device, model, context, sizes
        most = max(sizes)
        rows = min(max_num_seqs, most)
        self.buffers = PromptBuffers(device, most, rows, max_blocks, max_model_len)
        self._steps: dict[int, RecordedPrompt] = {}

    def find(self, rows: StepRows) -> RecordedPrompt | None:
        """The smallest recorded step that holds these rows."""
        if rows.is_decode or rows.num_drafts.any() or rows.slots.size > self.buffers.num_rows:
            return None
        tokens = int(rows.counts.sum())
        size = next((size for size in self.sizes if size >= tokens), 0)
        if rows.slots.size > size or (size > FEW_TOKENS and tokens < LEAST_SHARE * size):
            return None
        return self._steps.get(size)

    def record(self, beside: CapturedGraph | None) -> None:
        """The largest first, so that one memory serves all."""
        for size in reversed(self.sizes):
            beside = self._record(size, beside)

    def estimate(self, beside: CapturedGraph | None) -> int:
        """Bytes that `record` will take: the largest makes the memory that serves the others, each of
        which costs no more than the second does."""
        free = [self.device.memory().free_bytes]
        for size in self.sizes[: -3 if len(self.sizes) > 1 else None : -1]:
            beside = self._record(size, beside)
            free.append(self.device.memory().free_bytes)
        other = max(0, free[1] - free[2]) if len(free) > 2 else 0
        return max(0, free[0] - free[-1]) + other * (len(self.sizes) - len(free) + 1)

    def _record(self, size: int, beside: CapturedGraph | None) -> CapturedGraph:
        step = RecordedPrompt(self, size)
        try:
            beside = step.record(beside)
        except Exception as error:
            if self.device.is_oom(error):
                raise ResourceError(
                    f"device memory ran out while a step of {size} prompt tokens was recorded; lower "
                    "--gpu-memory-utilization, or give --enforce-eager"
                ) from error
            raise WorkerError(
                f"a step of {size} prompt tokens cannot be recorded: {type(error).__name__}: {error}; "
                "try --enforce-eager"
            ) from error
        self._steps[size] = step
        return beside

    def drop(self) -> None:
        """Forget all recordings."""
        self._steps.clear()
        self.buffers.clear()


def forward(
    graphs: StepGraphs | None,
    loaded: LoadedModel,
    caches: list[tuple[Tensor, ...]],
    rows: StepRows,
    batch: AttentionBatch,
    input_ids: Tensor,
) -> tuple[ForwardContext, Tensor]:
    """Queue a step that is built on the host, recorded or operation by operation: what its layers were
    given, and the hidden states of its tokens."""
    recorded = None if graphs is None else graphs.find_prompt(rows)
    if recorded is not None:
        return recorded.run(batch, input_ids)
    metadata = {spec: driver.prepare(batch) for spec, driver in loaded.attention.items()}
    context = ForwardContext(batch, metadata, caches)
    return context, loaded.model.forward(input_ids, batch.positions, context)
