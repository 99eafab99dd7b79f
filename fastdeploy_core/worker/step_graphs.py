"""Decode steps recorded once and replayed: for a ladder of batch sizes, over fixed buffers.

A recorded step goes from the state of the slots (device_slots.py) to hidden states. Behind it stand two
short recordings to choose from: one draws greedily and writes back; one computes logits, for a sampler
that is not recorded. A smaller batch is padded with rows of nobody, which write nothing anywhere.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from fastdeploy_core.contracts.attention import AttentionBatch
from fastdeploy_core.contracts.small import GreedyLM
from fastdeploy_core.errors import ResourceError, WorkerError
from fastdeploy_core.layers.context import ForwardContext

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.attention import AttentionBackend
    from fastdeploy_core.contracts.device import (
        CapturedGraph,
        Communicator,
        DeviceBackend,
        DeviceLimits,
    )
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

    from .device_slots import DeviceSlots
    from .loader import LoadedModel

logger = logging.getLogger(__name__)

MAX_CAPTURED_ROWS = 512


def ladder(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to record when none are given, FastDeploy's: steps of 8 up to 128, of 16 up to 256, of
    32 above, and the largest batch itself."""
    most = min(max_num_seqs, MAX_CAPTURED_ROWS)
    steps = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 1025, 32)]
    return (*(size for size in steps if size < most), most)


def graph_sizes(
    config: EngineConfig,
    limits: DeviceLimits,
    drivers: Iterable[AttentionBackend],
    num_ranks: int,
) -> tuple[tuple[int, ...], str]:
    """Batch sizes to record, none if the device cannot or shall not, and a line for the report."""
    unable, long = [], False
    for driver in drivers:
        if not driver.can_capture_decode:
            unable.append(driver.name)
        long |= config.model.max_model_len > getattr(driver, "max_recorded_len", math.inf)
    obstacles = (
        (not config.graphs.enabled, "as asked"),
        (not limits.graph_capture, "the device records nothing"),
        (bool(unable), f"attention driver {unable[0] if unable else ''} cannot be recorded"),
        (long, f"sequences of {config.model.max_model_len} tokens are too long for it here"),
        (num_ranks > 1 and not limits.graph_collectives, "the device's collectives cannot"),
    )
    for applies, why in obstacles:
        if applies:
            return (), f"recorded decode steps: none, {why}"
    most = min(config.batch.max_num_seqs, config.graphs.max_size or config.batch.max_num_seqs)
    usual = (most,) if limits.graph_any_size else ladder(most)
    buckets = limits.step_buckets.decode_rows if limits.step_buckets else None
    wanted = config.graphs.sizes or buckets or usual
    sizes = tuple(size for size in wanted if size <= most)
    if not sizes:
        return (), f"recorded decode steps: none, no size up to {most} is among {list(wanted)}"
    if limits.graph_any_size:
        return sizes, f"recorded decode steps: up to {sizes[-1]} rows"
    return sizes, f"recorded decode steps: {len(sizes)} sizes, {sizes[0]} to {sizes[-1]} rows"


class RecordedStep:
    """A decode step of `size` rows with `width` tokens each."""

    def __init__(self, graphs: StepGraphs, size: int, width: int) -> None:
        self.size, self.width = size, width
        self._graphs, self._buffers = graphs, graphs.buffers[width]
        self.attention = self._buffers.batch(size)  # of what the host sees only shapes are right
        self.input_ids = self._buffers.input_ids[: size * width]
        self._forward: CapturedGraph | None = None
        self._head: CapturedGraph | None = None
        self._greedy: CapturedGraph | None = None
        # What a replay leaves here stays until the next replay of any step.
        self.context: ForwardContext | None = None
        self.hidden: Tensor = None  # [size * width, hidden size]
        self.logits: Tensor = None  # [size * width, vocabulary] float32
        self.drawn: Tensor = None  # [size * width] int64, the likeliest tokens
        self.accepted: Tensor | None = None  # [rows] int64 drafts that were right; None at width 1
        self._proposals: dict[int, CapturedGraph] = {}  # by number of drafts
        self._drafts: dict[int, Tensor] = {}  # [size, number] int64

    def record(self, beside: CapturedGraph | None) -> CapturedGraph:
        """Run once to get ready, then record; the memory of `beside` is used again."""
        capture = self._graphs.device.capture
        for run in (self.compute, self.compute_logits, self.draw_greedily):
            run()
        self._forward = capture(self.compute, beside)
        beside = beside or self._forward
        self._head = capture(self.compute_logits, beside)
        self._greedy = capture(self.draw_greedily, beside)
        if self._graphs.draft_numbers:
            # Recording computes nothing, and what drafts begin with has to be tokens.
            self._forward.replay()
            self._greedy.replay()
        for number in self._graphs.draft_numbers:
            self._record_proposal(number, beside)
        return beside

    def _record_proposal(self, number: int, beside: CapturedGraph) -> None:
        """`number` drafts behind `draw_greedily`, by a drafter on the device."""
        make = self._graphs.propose
        assert make is not None

        def propose() -> None:
            self._drafts[number] = make(self, number)

        propose()
        self._proposals[number] = self._graphs.device.capture(propose, beside)

    def replay_proposal(self, number: int, num_rows: int) -> Tensor | None:
        """Queue the drafts behind `replay_greedy`: [rows, number]. None: not recorded."""
        fitting = [recorded for recorded in self._proposals if recorded >= number]
        if not fitting:
            return None
        self._proposals[min(fitting)].replay()
        return self._drafts[min(fitting)][:num_rows, :number]

    def replay(self) -> None:
        """Queue everything up to the hidden states."""
        assert self._forward is not None
        self._forward.replay()

    def replay_head(self, num_rows: int) -> Tensor:
        """Queue the logits of the rows; behind `replay`."""
        assert self._head is not None
        self._head.replay()
        return self.logits[: num_rows * self.width]

    def replay_greedy(self, num_rows: int) -> Tensor:
        """Queue the likeliest tokens, and their writing back: marked tokens of the rows; behind
        `replay`."""
        assert self._greedy is not None
        self._greedy.replay()
        return self._buffers.results[:num_rows]

    def compute(self) -> None:
        """What is recorded first: from slots to hidden states."""
        graphs, slots, batch = self._graphs, self._graphs.slots, self.attention
        graphs.prepare(
            slots.rows[: self.size],
            slots.tables,
            slots.num_computed,
            slots.newest,
            slots.drafts,
            slots.num_drafts,
            graphs.block_size,
            self.input_ids,
            batch.positions,
            batch.slot_mapping,
            batch.seq_lens_dev,
            batch.block_tables_dev,
        )
        self.context = graphs.context(batch)
        self.hidden = graphs.model.forward(self.input_ids, batch.positions, self.context)

    def compute_logits(self) -> None:
        """From hidden states to logits."""
        self.logits = self._graphs.model.compute_logits(self.hidden)

    def draw_greedily(self) -> None:
        """From hidden states to slots."""
        graphs, model = self._graphs, self._graphs.model
        if isinstance(model, GreedyLM):
            drawn, peaks = model.greedy(self.hidden)
        else:
            logits = model.compute_logits(self.hidden)
            drawn = graphs.greedy_kernel(logits)
            peaks = graphs.xp.gather(logits, 1, drawn.unsqueeze(1)).squeeze(1)
        self.drawn = drawn
        self.write_back(self.size, drawn, graphs.mark(drawn, peaks, None))

    def write_back(self, num_rows: int, drawn: Tensor, marked: Tensor) -> Tensor:
        """The slots take what was drawn, as far as drafts are right; [num_rows, width] marked tokens
        for the host, -1 behind the last one."""
        graphs, slots, results = self._graphs, self._graphs.slots, self._buffers.results[:num_rows]
        rows, accepted = slots.rows[:num_rows], None
        if self.width > 1:
            accepted = slots.count_accepted(rows, drawn.view([num_rows, self.width]))
        self.accepted = accepted
        graphs.finish(rows, drawn, marked, accepted, slots.num_computed, slots.newest, results)
        return results


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


class StepGraphs:
    """All recorded steps of one rank. `widths`: tokens per row, 1 and with speculation 1 + drafts.

    `propose` makes drafts behind a step; it is recorded for each of the `draft_numbers`.
    """

    def __init__(
        self,
        device: DeviceBackend,
        kernels: KernelTable,
        loaded: LoadedModel,
        slots: DeviceSlots,
        sizes: tuple[int, ...],
        *,
        block_size: int,
        max_model_len: int,
        widths: tuple[int, ...] = (1,),
        communicator: Communicator | None = None,
        draft_numbers: tuple[int, ...] = (),
        propose: Callable[[RecordedStep, int], Tensor] | None = None,
    ) -> None:
        self.draft_numbers, self.propose = draft_numbers, propose
        self.device, self.xp, self.slots, self.block_size = device, device.xp, slots, block_size
        self.model, self.communicator, self._loaded = loaded.model, communicator, loaded
        self.prepare, self.finish = kernels["prepare_decode"], kernels["finish_decode"]
        self.greedy_kernel, self.mark = kernels["greedy"], kernels["mark_broken"]
        self.sizes, self.widths = tuple(sorted(sizes)), widths
        max_blocks = slots.tables.shape[1]
        self.buffers = {
            width: StepBuffers(device, max(sizes), width, max_blocks, max_model_len + width - 1)
            for width in widths
        }
        self._steps: dict[tuple[int, int], RecordedStep] = {}
        self._caches: list[tuple[Tensor, ...]] = []

    def find(self, num_rows: int, width: int) -> RecordedStep | None:
        """The smallest recorded step that holds the rows."""
        size = next((size for size in self.sizes if size >= num_rows), 0)
        return self._steps.get((size, width))

    def context(self, batch: AttentionBatch) -> ForwardContext:
        """What the model's layers need."""
        metadata = {spec: driver.prepare(batch) for spec, driver in self._loaded.attention.items()}
        return ForwardContext(batch, metadata, self._caches)

    def record(self, caches: list[tuple[Tensor, ...]], *, is_first_rank: bool = True) -> None:
        """Record every step over these caches, the largest first, so that one memory serves all."""
        began, free = time.perf_counter(), self.device.memory().free_bytes
        bar = tqdm(
            list(self._wanted()),
            desc="recording decode steps",
            leave=False,
            disable=None if is_first_rank else True,  # None: only where there is a terminal
        )
        self._record_all(caches, bar)
        used = max(0, free - self.device.memory().free_bytes) / 1024**3
        logger.info(
            "recorded %d decode steps of up to %d rows in %.1f s, %.2f GiB",
            len(self._steps),
            max(self.sizes),
            time.perf_counter() - began,
            used,
        )

    def estimate(self, caches: list[tuple[Tensor, ...]]) -> int:
        """Bytes that recording all steps will take: the two largest make the memory that serves the
        others, each of which costs what the third one does. Nothing stays recorded."""
        wanted = list(self._wanted())
        free = [self.device.memory().free_bytes]
        beside: CapturedGraph | None = None
        self._caches = caches
        self.slots.stand_down()
        for size, width in wanted[:3]:
            beside = self._record(size, width, beside)
            free.append(self.device.memory().free_bytes)
        self.drop()
        other = max(0, free[2] - free[3]) if len(free) > 3 else 0
        return max(0, free[0] - free[-1]) + other * (len(wanted) - len(free) + 1)

    def drop(self) -> None:
        """Forget all recordings and the caches they point to."""
        self._steps.clear()
        self._caches = []
        gc.collect()

    def _wanted(self) -> Iterator[tuple[int, int]]:
        for size in reversed(self.sizes):
            for width in sorted(self.widths, reverse=True):
                yield size, width

    def _record_all(self, caches: list[tuple[Tensor, ...]], wanted: tqdm[tuple[int, int]]) -> None:
        self._caches = caches
        self.slots.stand_down()
        beside: CapturedGraph | None = None
        for size, width in wanted:
            beside = self._record(size, width, beside)

    def _record(self, size: int, width: int, beside: CapturedGraph | None) -> CapturedGraph:
        step = RecordedStep(self, size, width)
        try:
            beside = step.record(beside)
        except Exception as error:
            advice = (
                f"--cudagraph-capture-sizes with sizes below {size}, or --enforce-eager for none"
            )
            if self.device.is_oom(error):
                raise ResourceError(
                    f"device memory ran out while a decode step of {size} rows was recorded; lower "
                    f"--gpu-memory-utilization, or give {advice}"
                ) from error
            raise WorkerError(
                f"a decode step of {size} rows cannot be recorded: {type(error).__name__}: {error}; "
                f"try {advice}"
            ) from error
        self._steps[size, width] = step
        return beside
