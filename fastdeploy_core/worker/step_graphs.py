"""Decode steps recorded once and replayed: for a ladder of batch sizes, over fixed buffers.

A recorded step goes from the state of the slots (device_slots.py) to hidden states. Behind it stand two
short recordings to choose from: some draw, greedily or at random, and write back; one computes logits,
for a sampler that is not recorded. A smaller batch is padded with rows of nobody, which write nothing anywhere.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from tqdm import tqdm

from fastdeploy_core.contracts.attention import AttentionBatch
from fastdeploy_core.contracts.small import GreedyLM
from fastdeploy_core.errors import ResourceError, WorkerError
from fastdeploy_core.layers.context import ForwardContext

from .prompt_graphs import PromptGraphs
from .recorded_sizes import unlike
from .step_buffers import DecodeBuffers, DraftsWithResults

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.contracts.device import (
        CapturedGraph,
        Communicator,
        DeviceBackend,
    )
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.tensor import Tensor

    from .device_slots import DeviceSlots
    from .multi_step import MultiStep
    from .prompt_graphs import RecordedPrompt
    from .recorded_draws import RecordedDraws
    from .step_rows import StepRows

logger = logging.getLogger(__name__)


class RecordedStep:
    """A decode step of `size` rows with `width` tokens each."""

    def __init__(self, graphs: StepGraphs, size: int, width: int) -> None:
        self.size, self.width = size, width
        self._graphs, self._buffers = graphs, graphs.buffers[width]
        self.attention = self._buffers.batch(size)  # of what the host sees only shapes are right
        self.input_ids = self._buffers.input_ids[: size * width]
        self.firsts = self._buffers.firsts[:size]
        self._forward: CapturedGraph | None = None
        self._head: CapturedGraph | None = None
        self._greedy: CapturedGraph | None = None
        self._random: dict[bool, CapturedGraph] = {}  # by whether rows are filtered
        # What a replay leaves here stays until the next replay of any step.
        self.context: ForwardContext | None = None
        self.hidden: Tensor = None  # [size * width, hidden size]
        self.logits: Tensor = None  # [size * width, vocabulary] float32
        self.drawn: Tensor = None  # [size * width] int64
        self.accepted: Tensor | None = None  # [size] int64 drafts that were right; None at width 1
        # By number of drafts, and whether rows draw them at random.
        self._proposals: dict[tuple[int, bool], CapturedGraph] = {}
        self._drafts: dict[tuple[int, bool], DraftsWithResults] = {}

    def record(self, beside: CapturedGraph | None) -> CapturedGraph:
        """Run once to get ready, then record; the memory of `beside` is used again."""
        capture = self._graphs.device.capture
        self.run_once()
        self._forward = capture(self.compute, beside)
        beside = beside or self._forward
        self._head = capture(self.compute_logits, beside)
        self._greedy = capture(self.draw_greedily, beside)
        if self._graphs.draws is not None:
            for filters in (False, True):
                draw = partial(self.draw_at_random, filters=filters)
                draw()
                self._random[filters] = capture(draw, beside)
        if self._graphs.draft_numbers:
            # Recording computes nothing, and what drafts begin with has to be tokens.
            self._forward.replay()
            self._greedy.replay()
        for number in self._graphs.draft_numbers:
            for is_random in self._graphs.draft_draws:
                self._record_proposal(number, is_random, beside)
        return beside

    def run_once(self) -> None:
        """Whatever is made at first use exists afterwards."""
        for run in (self.compute, self.compute_logits, self.draw_greedily):
            run()

    def _record_proposal(self, number: int, is_random: bool, beside: CapturedGraph) -> None:
        """`number` drafts behind what was drawn, by a drafter on the device."""
        make = self._graphs.propose
        assert make is not None

        def propose() -> None:
            self._graphs.slots.append_history(self._buffers.results[: self.size])
            proposals = make(self, number, is_random)
            kept = self.keep_drafts(self.size, proposals)
            # One copy to the host for both: it costs the host more than this costs the device.
            values = self._graphs.xp.cat((self._buffers.results[: self.size], kept), 1)
            self._drafts[number, is_random] = DraftsWithResults(values, self.width)

        propose()
        self._proposals[number, is_random] = self._graphs.device.capture(propose, beside)

    def replay_proposal(self, number: int, is_random: bool) -> DraftsWithResults:
        """Queue the drafts behind `replay_greedy` or `write_back`: those of the smallest recorded number,
        of which the slots take no more than is asked."""
        key = (next(n for n in self._graphs.draft_numbers if n >= number), is_random)
        self._proposals[key].replay()
        return self._drafts[key]

    def keep_drafts(self, num_rows: int, proposals: Tensor) -> Tensor:
        """The rows' slots take drafts for the next step; what they took."""
        slots = self._graphs.slots
        return slots.keep_drafts(slots.rows[:num_rows], proposals)

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
        return self._buffers.results_of(num_rows)

    @property
    def draws_at_random(self) -> bool:
        """Whether replay_random is possible."""
        return bool(self._random)

    def replay_random(self, slots: np.ndarray, *, filters: bool) -> Tensor:
        """replay_greedy for rows of which some draw at random."""
        assert self._graphs.draws is not None
        self._graphs.draws.fill(slots)
        self._random[filters].replay()
        return self._buffers.results_of(slots.size)

    def parts(self, *, is_random: bool, filters: bool) -> tuple[CapturedGraph, CapturedGraph]:
        """What `replay` and then a draw replay."""
        assert self._forward is not None and self._greedy is not None
        return self._forward, self._random[filters] if is_random else self._greedy

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
            slots.room,
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
        self.accepted = self._finish(self.size, drawn, graphs.mark(drawn, peaks, None))

    def draw_at_random(self, *, filters: bool) -> None:
        """From hidden states to slots, as the sampler does it for rows without constraints."""
        graphs, draws = self._graphs, self._graphs.draws
        assert draws is not None
        logits = graphs.model.compute_logits(self.hidden)
        drawn, peaks = draws.draw(logits, self.attention.positions, self.width, filters=filters)
        self._hand_on(self._finish(self.size, drawn, graphs.mark(drawn, peaks, None)), drawn)

    def write_back(self, num_rows: int, drawn: Tensor, marked: Tensor) -> Tensor:
        """What a sampler drew that is not recorded, as if `draw_greedily` had: marked tokens of the
        rows. Drafts are made for rows of nobody, too: what other steps have left in their places may
        be no token."""
        self._hand_on(self._finish(num_rows, drawn, marked), drawn)
        if num_rows < self.size:
            self.drawn[num_rows * self.width :] = 0
            if self.accepted is not None:
                self.accepted[num_rows:] = 0
        return self._buffers.results_of(num_rows)

    def _hand_on(self, accepted: Tensor | None, drawn: Tensor) -> None:
        """Put what was drawn where proposals look for it, if some are recorded: where `draw_greedily` does."""
        if not self._graphs.draft_numbers:
            return
        self.drawn[: drawn.shape[0]].copy_(drawn)
        if accepted is not None and self.accepted is not None:
            self.accepted[: accepted.shape[0]].copy_(accepted)

    def _finish(self, num_rows: int, drawn: Tensor, marked: Tensor) -> Tensor | None:
        """The slots take what was drawn, as far as drafts are right, and the results are marked tokens
        for the host, -1 behind each row's last one. The number of right drafts."""
        graphs, slots, results = self._graphs, self._graphs.slots, self._buffers.results[:num_rows]
        rows, accepted = slots.rows[:num_rows], None
        if self.width > 1:
            shape = [num_rows, self.width]
            accepted = slots.count_accepted(rows, drawn.view(shape), marked.view(shape))
        graphs.finish(rows, drawn, marked, accepted, slots.num_computed, slots.newest, results)
        if graphs.multi is not None and self.width == 1:
            graphs.multi.keep(rows, results, slots.num_computed)
        return accepted


class StepGraphs:
    """All recorded steps of one rank. `widths`: tokens per row, 1 and with speculation 1 + drafts.

    `propose` makes drafts behind a step; it is recorded for each of the `draft_numbers`, and for greedy
    rows or ones that draw at random as `draft_draws` says. With `draws` steps may end in draws at random.
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
        draft_draws: tuple[bool, ...] = (False,),
        propose: Callable[[RecordedStep, int, bool], Tensor] | None = None,
        fill: Callable[[RecordedPrompt], None] | None = None,
        prompt_sizes: tuple[int, ...] = (),
        draws: RecordedDraws | None = None,
        multi: MultiStep | None = None,
    ) -> None:
        self.draws, self.multi = draws, multi
        self.draft_numbers, self.draft_draws, self.propose = draft_numbers, draft_draws, propose
        self.device, self.xp, self.slots, self.block_size = device, device.xp, slots, block_size
        self.model, self.communicator, self._loaded = loaded.model, communicator, loaded
        self.prepare, self.finish = kernels["prepare_decode"], kernels["finish_decode"]
        self.greedy_kernel, self.mark = kernels["greedy"], kernels["mark_broken"]
        self.sizes, self.widths = tuple(sorted(sizes)), tuple(sorted(widths))
        max_blocks = slots.tables.shape[1]
        self.buffers = {
            width: DecodeBuffers(device, max(sizes), width, max_blocks, max_model_len + width - 1)
            for width in widths
        }
        self._steps: dict[tuple[int, int], RecordedStep] = {}
        self._caches: list[tuple[Tensor, ...]] = []
        self._prompts: PromptGraphs | None = None
        if prompt_sizes:
            self._prompts = PromptGraphs(
                device,
                loaded.model,
                self.context,
                prompt_sizes,
                max_num_seqs=int(slots.tables.shape[0]) - 1,
                max_blocks=max_blocks,
                max_model_len=max_model_len,
                fill=fill,
            )

    def find_prompt(self, rows: StepRows) -> RecordedPrompt | None:
        """A recorded step for rows that are not all decodes."""
        return None if self._prompts is None else self._prompts.find(rows)

    def find(self, num_rows: int, width: int) -> RecordedStep | None:
        """The smallest recorded step that holds so many rows of up to `width` tokens."""
        size, wide = bisect_left(self.sizes, num_rows), bisect_left(self.widths, width)
        if size == len(self.sizes) or wide == len(self.widths):
            return None
        return self._steps.get((self.sizes[size], self.widths[wide]))

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
            "recorded %d decode steps of up to %d rows, prompts of %d sizes, in %.1f s, %.2f GiB",
            len(self._steps),
            max(self.sizes),
            0 if self._prompts is None else len(self._prompts.sizes),
            time.perf_counter() - began,
            used,
        )

    def rehearse(self, caches: list[tuple[Tensor, ...]]) -> None:
        """Run steps of unlike sizes once, so that their kernels are met. Nothing stays."""
        self._caches = caches
        self.slots.stand_down()
        for size, width in self._wanted():
            if size in unlike(self.sizes):
                RecordedStep(self, size, width).run_once()
        if self._prompts is not None:
            self._prompts.rehearse()
        self.drop()

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
        other = max(0, free[2] - free[3]) if len(free) > 3 else 0
        needed = max(0, free[0] - free[-1]) + other * (len(wanted) - len(free) + 1)
        if self._prompts is not None:
            needed += self._prompts.estimate(beside)
        self.drop()
        return needed

    def drop(self) -> None:
        """Forget all recordings and the caches they point to."""
        self._steps.clear()
        if self._prompts is not None:
            self._prompts.drop()
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
        if self._prompts is not None:
            self._prompts.record(beside)

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
