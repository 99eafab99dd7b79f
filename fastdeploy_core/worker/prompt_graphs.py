"""Recorded steps of prompts, and of prompts beside decodes: the forward pass of up to so many tokens.

A model of small layers computes a short prompt faster than the host can queue its kernels. Such steps are
padded to the next size of a ladder and replayed: what differs between them lies in buffers on the device. Where
padding costs nothing (limits.graph_any_size) the largest step serves all.
Hidden states come out of them for sampled tokens alone, but for a drafter that fills its own cache.
Logits and the draw stay outside; step_graphs.py owns the recordings of decode steps.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fastdeploy_core.contracts.device import SizedGraph
from fastdeploy_core.errors import ResourceError, WorkerError
from fastdeploy_core.layers.context import ForwardContext

from .draft_batch import TargetStep
from .step_buffers import PromptBuffers
from .step_rows import padded

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from fastdeploy_core.contracts.attention import AttentionBatch
    from fastdeploy_core.contracts.device import CapturedGraph, DeviceBackend
    from fastdeploy_core.contracts.small import CausalLM
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.tensor import Tensor

    from .step_graphs import StepGraphs
    from .step_rows import StepRows

# A recording of more than FEW_TOKENS is used if at least this share of it is tokens: padding is computed.
LEAST_SHARE, FEW_TOKENS = 0.75, 2048


class RecordedPrompt:
    """The forward pass of up to `size` tokens."""

    def __init__(self, graphs: PromptGraphs, size: int) -> None:
        self.size, self._graphs = size, graphs
        self.attention = graphs.buffers.batch(size)
        self.input_ids = graphs.buffers.input_ids[:size]
        self.next_ids = graphs.buffers.next_ids[:size]
        self.last = graphs.buffers.last[: self.attention.num_seqs]
        self.context: ForwardContext | None = None
        # [rows that there can be, hidden], or with `fill` [size, hidden]; stays until the next replay of any step
        self.hidden: Tensor = None
        self._forward: CapturedGraph | None = None
        self._fill: CapturedGraph | None = None

    def record(self, beside: CapturedGraph | None) -> CapturedGraph:
        """Run once to get ready, then record; the memory of `beside` is used again. On a device where one
        recording serves any size running all of it would take as long as such a step, and nothing needs it."""
        capture, fill = self._graphs.device.capture, self._graphs.fill
        if not self._graphs.any_size:
            self.run_once()
        self._forward = capture(self.run_once, beside)
        if fill is not None:
            # Recording computes nothing, and what the drafter's layers are given has to be numbers.
            self._forward.replay()
            fill(self)
            filled = capture(partial(fill, self), beside or self._forward)
            self._fill = filled if self._graphs.takes(filled) else None
        return self._forward

    @property
    def is_taken(self) -> bool:
        """Whether it serves steps; a drafter's cache is filled operation by operation where that alone is no
        recording for any size."""
        return self._graphs.takes(self._forward)

    def run(self, batch: AttentionBatch, input_ids: Tensor, read: np.ndarray | None) -> TargetStep:
        """Queue a step; see `forward`."""
        assert self._forward is not None and self.context is not None
        graphs, rows = self._graphs, self.context.rows
        graphs.buffers.take(batch, input_ids, self.size)
        if rows is not None and read is not None:
            rows.copy_(graphs.device.to_device(padded(read, int(rows.shape[0]))))
        self._forward.replay()
        hidden = self.hidden[: batch.num_tokens if read is None else read.size]
        return TargetStep(batch, self.context, input_ids, hidden, self if self._fill else None)

    def fill(self, next_ids: Tensor, last: Tensor) -> None:
        """Queue what keeps a drafter's cache complete, behind `run`. See DraftBatch."""
        assert self._fill is not None
        self._graphs.buffers.take_drawn(next_ids, last)
        self._fill.replay()

    def run_once(self) -> None:
        """What is recorded."""
        graphs, batch = self._graphs, self.attention
        self.context = graphs.context(batch)
        if not graphs.reads_all:
            self.context.rows = graphs.buffers.read_tokens[: batch.num_seqs]
        self.hidden = run_model(graphs.model, self.input_ids, self.context)


class PromptGraphs:
    """All recorded steps of prompts of one rank; `context` makes what layers need of a batch, `fill` has
    a drafter fill its own cache."""

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
        fill: Callable[[RecordedPrompt], None] | None = None,
    ) -> None:
        self.fill, self.reads_all = fill, fill is not None
        self.device, self.model, self.context, self.sizes = device, model, context, sizes
        self.any_size = device.limits.graph_any_size
        most = max(sizes)
        rows = min(max_num_seqs, most)
        self.buffers = PromptBuffers(device, most, rows, max_blocks, max_model_len)
        self._steps: dict[int, RecordedPrompt] = {}

    def find(self, rows: StepRows, *, reads_all: bool) -> RecordedPrompt | None:
        """The smallest recorded step that holds these rows. `reads_all`: hidden states of every token are."""
        if rows.is_decode or rows.num_drafts.any() or rows.slots.size > self.buffers.num_rows:
            return None
        if reads_all != self.reads_all:
            return None
        tokens = int(rows.counts.sum())
        size = next((size for size in self.sizes if size >= tokens), 0)
        is_padding_dear = size > FEW_TOKENS and not self.any_size
        if rows.slots.size > size or (is_padding_dear and tokens < LEAST_SHARE * size):
            return None
        return self._steps.get(size)

    def record(self, beside: CapturedGraph | None) -> None:
        """The largest first, so that one memory serves all."""
        for size in reversed(self.sizes):
            beside = self._record(size, beside)

    def rehearse(self) -> None:
        """Run a step of each size once, so that its kernels are met."""
        for size in () if self.any_size else self.sizes:
            RecordedPrompt(self, size).run_once()

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
        if step.is_taken:
            self._steps[size] = step
        return beside

    def takes(self, graph: CapturedGraph | None) -> bool:
        """Whether fewer tokens cost less in it, where the device says so of its recordings."""
        if not self.any_size or not isinstance(graph, SizedGraph):
            return True
        return graph.is_any_size

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
    read: np.ndarray | None,
) -> TargetStep:
    """Queue a step that is built on the host, recorded or operation by operation. `read`: StepRows.read_tokens,
    or None: hidden states of all tokens are wanted."""
    recorded = None if graphs is None else graphs.find_prompt(rows, reads_all=read is None)
    if recorded is not None:
        return recorded.run(batch, input_ids, read)
    metadata = {spec: driver.prepare(batch) for spec, driver in loaded.attention.items()}
    index = None if read is None else loaded.builder.device.to_device(read)
    context = ForwardContext(batch, metadata, caches, index)
    return TargetStep(batch, context, input_ids, run_model(loaded.model, input_ids, context))


def run_model(model: CausalLM, input_ids: Tensor, context: ForwardContext) -> Tensor:
    """Hidden states of context.rows, or of all tokens. WorkerError: the model returns others than it should."""
    hidden, rows = model.forward(input_ids, context.batch.positions, context), context.rows
    if rows is not None and hidden.shape[0] != rows.shape[0]:
        raise WorkerError(
            f"{type(model).__name__}.forward returned {int(hidden.shape[0])} hidden states where context.rows names "
            f"{int(rows.shape[0])} of {context.batch.num_tokens} tokens; it has to return those alone (contract 1.0)"
        )
    return hidden
