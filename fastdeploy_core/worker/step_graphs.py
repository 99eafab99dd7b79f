"""Decode steps recorded once and replayed: for a ladder of batch sizes, over fixed buffers.

A smaller batch is padded with rows of nobody, which write nothing anywhere.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tqdm import tqdm

from fastdeploy_core.contracts.attention import AttentionBatch
from fastdeploy_core.errors import ResourceError, WorkerError
from fastdeploy_core.layers.context import ForwardContext

from .prompt_graphs import PromptGraphs
from .recorded_sizes import unlike
from .recorded_step import RecordedStep
from .step_buffers import DecodeBuffers

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import (
        CapturedGraph,
        Communicator,
        DeviceBackend,
    )
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.tensor import Tensor

    from .device_slots import DeviceSlots
    from .multi_step import KeptResults
    from .prompt_graphs import RecordedPrompt
    from .recorded_draws import RecordedDraws
    from .step_rows import StepRows

logger = logging.getLogger(__name__)


class StepGraphs:
    """All recorded steps of one rank. `widths`: tokens per row, 1 and with speculation 1 + drafts.

    `propose` makes drafts behind a step; it is recorded for each of the `draft_numbers`: behind greedy rows, and
    behind any others, whose drafts are drawn as theirs are where `drafts_at_random` says so. With `draws` steps
    may end in draws at random.
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
        drafts_at_random: bool = False,
        propose: Callable[[RecordedStep, int, bool], Tensor] | None = None,
        fill: Callable[[RecordedPrompt], None] | None = None,
        prompt_sizes: tuple[int, ...] = (),
        draws: RecordedDraws | None = None,
        kept: KeptResults | None = None,
    ) -> None:
        self.draws, self.kept = draws, kept
        self.draft_numbers, self.drafts_at_random = draft_numbers, drafts_at_random
        self.propose = propose
        self.device, self.xp, self.slots, self.block_size = device, device.xp, slots, block_size
        self.model, self.communicator, self._loaded = loaded.model, communicator, loaded
        self.prepare, self.greedy_kernel = kernels["prepare_decode"], kernels["greedy"]
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

    def find_prompt(self, rows: StepRows, *, reads_all: bool) -> RecordedPrompt | None:
        """A recorded step for rows that are not all decodes; see PromptGraphs.find."""
        return None if self._prompts is None else self._prompts.find(rows, reads_all=reads_all)

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
