"""Captured graphs: decode steps for a ladder of batch sizes, and steps with prompts for a ladder of
numbers of tokens, over fixed buffers.

A model of small layers computes a step faster than the host can queue its kernels. A captured step
is replayed instead; what differs from step to step lies in buffers on the device. A smaller batch
is padded with rows of the last slot, which write nothing anywhere. Where padding costs nothing
(limits.graph_any_size) the largest graph serves all."""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tqdm import tqdm

from fastdeploy_core.contracts.device import PostingDevice, RepeatingDevice, SizedGraph
from fastdeploy_core.contracts.small import GreedyLM
from fastdeploy_core.errors import ResourceError, WorkerError
from fastdeploy_core.sampling.processors import has_processors

from .graph_sizes import unlike
from .layout import DecodeBuffers, LaidOut, PromptBuffers
from .step import StepRows, TargetStep, padded

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.device import CapturedGraph, DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.layers.context import ForwardContext
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.memory.postbox import Posted
    from fastdeploy_core.models.media import CapturedVectors, SequenceMedia
    from fastdeploy_core.sampling.captured import CapturedSampling
    from fastdeploy_core.tensor import Tensor

    from .drafting import Drafting
    from .slots import Slots

logger = logging.getLogger(__name__)

# A graph of more than FEW_TOKENS serves a prompt if at least this share of it is tokens: padding is
# computed.
LEAST_SHARE, FEW_TOKENS = 0.75, 2048


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What is captured."""

    sizes: tuple[int, ...]  # rows of decode steps
    widths: tuple[int, ...]  # tokens per row: 1, and with speculation 1 + drafts
    draft_numbers: tuple[int, ...]  # drafts made after a step; none: by nobody, or on the host
    prompt_sizes: tuple[int, ...]  # tokens of steps with prompts
    num_decodes: int = 1  # see WorkerInfo.max_decodes


def max_decodes(config: EngineConfig, device: DeviceBackend) -> int:
    """WorkerInfo.max_decodes, where one rank has captured steps of any size and their sampling."""
    limits = device.limits
    overlaps = limits.overlap and config.batch.overlap
    # Kept results are those of one step, of which the host reads all before it plans the next one.
    keeps_up = isinstance(device, PostingDevice) or not overlaps
    is_one = has_processors(config) or config.parallel.shares_experts or not keeps_up
    return 1 if is_one else limits.decodes_per_step


class Graphs:
    """All captured graphs of one rank. `sampling`: steps may end in sampling at random."""

    def __init__(
        self,
        device: DeviceBackend,
        kernels: KernelTable,
        loaded: LoadedModel,
        slots: Slots,
        plan: GraphPlan,
        drafting: Drafting | None = None,
        sampling: CapturedSampling | None = None,
        media: SequenceMedia | None = None,
    ) -> None:
        self.device, self.xp, self.slots, self.plan = device, device.xp, slots, plan
        self.model, self.loaded = loaded.model, loaded
        self.offsets = None if media is None else media.offsets
        self.drafting, self.sampling = drafting, sampling
        self.prepare, self.greedy = kernels["prepare_decode"], kernels["greedy"]
        self.no_turn = self.xp.zeros_like(slots.state.turn)  # groups of layers have the same turn
        self.keep_results = kernels["keep_results"]
        self.any_size = device.limits.graph_any_size
        # A drafter with layers of its own has to fill its cache after prompts, too.
        self.fill = None if drafting is None else drafting.captured_fill
        tables, most = slots.block_tables.shape[1], max(plan.sizes)
        # Of each group of layers: they differ in block tables and in where tokens lie.
        self.buffers = {
            width: [
                DecodeBuffers(device, most, width, tables, slots.max_model_len + width - 1)
                for _ in slots.tables
            ]
            for width in plan.widths
        }
        self.prompt_buffers: PromptBuffers | None = None
        self.vectors: CapturedVectors | None = None  # of steps with pictures, if they are captured
        if plan.prompt_sizes:
            tokens = max(plan.prompt_sizes)
            rows = min(slots.max_num_seqs, tokens)
            self.prompt_buffers = PromptBuffers(device, tokens, rows, tables, slots.max_model_len)
            if media is not None and self.fill is None and not self.any_size:
                self.vectors = media.captured(loaded.dtype, loaded.shapes.hidden_size, tokens)
        # Where decodes follow each other and nothing is posted, each leaves its results here; the
        # host reads those of the last few at once.
        self.kept: Tensor = None
        if plan.num_decodes > 1 and slots.postbox is None:
            shape = (most, plan.num_decodes)
            self.kept = self.xp.zeros(shape, dtype=self.xp.int64, device=device.device)
        self._decodes: dict[tuple[int, int], CapturedDecode] = {}
        self._prompts: dict[tuple[int, bool], CapturedPrompt] = {}  # by size, and with vectors
        self.caches: list[tuple[Tensor, ...]] = []

    def find(self, num_rows: int, width: int) -> CapturedDecode | None:
        """The smallest captured decode step that holds so many rows of up to `width` tokens."""
        sizes, widths = self.plan.sizes, self.plan.widths
        size, wide = bisect_left(sizes, num_rows), bisect_left(widths, width)
        if size == len(sizes) or wide == len(widths):
            return None
        return self._decodes.get((sizes[size], widths[wide]))

    def find_prompt(self, rows: StepRows, *, reads_all: bool, sees: bool) -> CapturedPrompt | None:
        """The smallest graph for these rows of a step laid out on the host. Hidden states come out
        of it for sampled tokens alone, but for a drafter that fills its own cache. reads_all: those
        of every token are wanted. sees: some tokens have vectors."""
        buffers = self.prompt_buffers
        if buffers is None or rows.is_decode or rows.num_drafts.any():
            return None
        if rows.slots.size > buffers.num_rows or reads_all != (self.fill is not None):
            return None
        tokens = int(rows.counts.sum())
        size = next((size for size in self.plan.prompt_sizes if size >= tokens), 0)
        is_padding_dear = size > FEW_TOKENS and not self.any_size
        if rows.slots.size > size or (is_padding_dear and tokens < LEAST_SHARE * size):
            return None
        return self._prompts.get((size, sees))

    def takes(self, graph: CapturedGraph | None) -> bool:
        """Whether fewer tokens cost less in a graph, where the device says so of its graphs."""
        return not (self.any_size and isinstance(graph, SizedGraph)) or graph.is_any_size

    def capture(self, caches: list[tuple[Tensor, ...]], *, is_first_rank: bool = True) -> None:
        """Capture everything over these caches, the largest first: one memory serves all."""
        began, free = time.perf_counter(), self.device.memory().free_bytes
        bar = tqdm(
            [step for kind in self._steps() for step in kind],
            desc="capturing graphs",
            leave=False,
            disable=None if is_first_rank else True,  # None: only where there is a terminal
        )
        self._begin(caches)
        beside: CapturedGraph | None = None
        for step in bar:
            beside = self._capture(step, beside)
        counts = len(self._decodes), max(self.plan.sizes), len(self.plan.prompt_sizes)
        taken = max(0, free - self.device.memory().free_bytes) / 1024**3
        about = "captured %d graphs: decodes up to %d rows, prompts of %d sizes; %.1f s, %.2f GiB"
        logger.info(about, *counts, time.perf_counter() - began, taken)

    def rehearse(self, caches: list[tuple[Tensor, ...]]) -> None:
        """Run steps of unlike sizes once, so that their kernels are met. Nothing stays."""
        self._begin(caches)
        decodes, *prompts = self._steps()
        sizes = unlike(self.plan.sizes)
        for step in (step for step in decodes if step.size in sizes):
            step.run_once()
        for step in () if self.any_size else (step for kind in prompts for step in kind):
            step.run_once()
        self.drop()

    def estimate(self, caches: list[tuple[Tensor, ...]]) -> int:
        """Bytes that `capture` will take. The first graphs, the largest, make the memory that
        serves the others, each of which costs what the third decode step or the second step with
        prompts does. Nothing stays captured."""
        self._begin(caches)
        needed, beside = 0, None
        for measured, last in zip(self._steps(), (3, 2, 2), strict=True):
            free = [self.device.memory().free_bytes]
            for step in measured[:last]:
                beside = self._capture(step, beside)
                free.append(self.device.memory().free_bytes)
            other = max(0, free[-2] - free[-1]) if len(free) > last else 0
            needed += max(0, free[0] - free[-1]) + other * (len(measured) - len(free) + 1)
        self.drop()
        return needed

    def drop(self) -> None:
        """Forget all graphs and the caches they point to."""
        self._decodes.clear()
        self._prompts.clear()
        if self.prompt_buffers is not None:
            self.prompt_buffers.clear()
        self.caches = []
        gc.collect()

    def _begin(self, caches: list[tuple[Tensor, ...]]) -> None:
        self.caches = caches
        self.slots.stand_down()

    def _steps(self) -> list[list[CapturedDecode | CapturedPrompt]]:
        """Of decodes, of prompts, and of prompts with pictures; each the largest first."""
        plan, sizes = self.plan, self.plan.prompt_sizes[::-1]
        return [
            [CapturedDecode(self, n, w) for n in plan.sizes[::-1] for w in plan.widths[::-1]],
            [CapturedPrompt(self, size) for size in sizes],
            [CapturedPrompt(self, n, self.vectors) for n in sizes if self.vectors is not None],
        ]

    def _capture(
        self, step: CapturedDecode | CapturedPrompt, beside: CapturedGraph | None
    ) -> CapturedGraph:
        is_decode, advice = isinstance(step, CapturedDecode), "--enforce-eager"
        what = f"a step of {step.size} prompt tokens"
        if is_decode:
            what = f"a decode step of {step.size} rows"
            advice = f"--cudagraph-capture-sizes with sizes below {step.size}, or {advice} for none"
        try:
            beside = step.capture(beside)
        except Exception as error:
            if self.device.is_oom(error):
                raise ResourceError(
                    f"device memory ran out while {what} was captured; lower "
                    f"--gpu-memory-utilization, or give {advice}"
                ) from error
            raise WorkerError(
                f"{what} cannot be captured: {type(error).__name__}: {error}; try {advice}"
            ) from error
        if isinstance(step, CapturedDecode):
            self._decodes[step.size, step.width] = step
        elif self.takes(beside):
            self._prompts[step.size, step.vectors is not None] = step
        return beside


class CapturedDecode:
    """A decode step of `size` rows with `width` tokens each: from the slots to hidden states, and
    what may follow.

    Fewer, larger graphs would leave fewer to choose from. Greedy rows: one graph samples, verifies
    drafts, writes back and, where a drafter works on the device, drafts for the next step. Rows
    that sample at random: one samples and writes back. Any others: one computes logits, for a
    sampler that is not captured. After these two one may draft."""

    def __init__(self, graphs: Graphs, size: int, width: int) -> None:
        self.size, self.width = size, width
        self._graphs, self._buffers = graphs, graphs.buffers[width][0]
        # Of what the host sees only shapes are right.
        self.attention, *more = (buffers.batch(size) for buffers in graphs.buffers[width])
        self._more = dict(zip(graphs.slots.more_tables, more, strict=True))
        self.input_ids = self._buffers.input_ids[: size * width]
        self.indices = self.attention.positions  # of the tokens, in their sequences
        if graphs.offsets is not None:
            self.indices = self._buffers.zeros(size * width)
        self._forward: CapturedGraph | None = None
        self._head: CapturedGraph | None = None
        self._greedy: CapturedGraph | None = None
        self._random: dict[bool, CapturedGraph] = {}  # by whether rows are filtered
        self._replayed: list[CapturedGraph] = []  # since `replay`
        # What a replay leaves here stays until the next replay of any step.
        self.context: ForwardContext | None = None
        self.hidden: Tensor = None  # [size * width, hidden size]
        self.logits: Tensor = None  # [size * width, vocabulary] float32
        self.sampled: Tensor = None  # [size * width] int64
        self.last: Tensor = None  # [size] int64: where in sampled each row's last kept token stands
        # By whether the greedy tokens are sampled in it, and number of drafts.
        self._drafting: dict[tuple[bool, int], CapturedGraph] = {}
        self._drafts: dict[tuple[bool, int], Tensor] = {}

    def capture(self, beside: CapturedGraph | None) -> CapturedGraph:
        """Run once to get ready, then capture; the memory of `beside` is used again."""
        graphs, capture = self._graphs, self._graphs.device.capture
        numbers = graphs.plan.draft_numbers
        self.run_once()
        self._forward = capture(self.compute, beside)
        beside = beside or self._forward
        self._head = capture(self.compute_logits, beside)
        self._greedy = capture(self.sample_greedily, beside)
        if numbers:
            self._forward.replay()  # capturing computes nothing, and what runs next needs states
        for number in numbers:
            self._capture_drafts(number, beside, is_greedy=True)
        # What is sampled elsewhere is handed on here.
        self.sampled = self._buffers.sampled[: self.size * self.width]
        self.last = self._buffers.last[: self.size]
        for filters in (False, True) if graphs.sampling is not None else ():
            sample = partial(self.sample_at_random, filters=filters)
            sample()
            self._random[filters] = capture(sample, beside)
        for number in numbers:
            self._capture_drafts(number, beside, is_greedy=False)
        return beside

    def run_once(self) -> None:
        """Whatever is made at first use exists afterwards."""
        for run in (self.compute, self.compute_logits, self.sample_greedily):
            run()

    def _capture_drafts(self, number: int, beside: CapturedGraph, *, is_greedy: bool) -> None:
        """`number` drafts, by a drafter on the device: after the greedy tokens, which are sampled
        in the same graph, or after what was handed on."""
        graphs, slots, size = self._graphs, self._graphs.slots, self.size
        drafting = graphs.drafting
        assert drafting is not None

        def run() -> None:
            if is_greedy:
                self.sample_greedily()
            results = self._buffers.results[:size]
            slots.append_history(results)
            # Results stand beside the drafts: a second copy to the host would cost it more.
            proposals = drafting.propose_captured(self, number, is_greedy=is_greedy)
            rows = slots.state.rows[:size]
            self._drafts[is_greedy, number] = slots.keep_drafts(
                rows, proposals, results, posts=True
            )

        run()
        self._drafting[is_greedy, number] = graphs.device.capture(run, beside)

    # -- replays, in this order -------------------------------------------------------------------

    def replay(self) -> None:
        """Queue everything up to the hidden states."""
        postbox = self._graphs.slots.postbox
        if postbox is not None:
            postbox.begin()
        self._replayed.clear()
        self._queue(self._forward)

    def replay_head(self, num_rows: int) -> Tensor:
        """Queue the logits of the rows."""
        self._queue(self._head)
        return self.logits[: num_rows * self.width]

    def replay_greedy(self, num_rows: int) -> Tensor:
        """Queue the likeliest tokens, and their writing back: marked tokens of the rows."""
        self._queue(self._greedy)
        return self._buffers.results_of(num_rows)

    @property
    def samples_at_random(self) -> bool:
        """Whether replay_random is possible."""
        return bool(self._random)

    def replay_random(self, slots: np.ndarray, *, filters: bool) -> Tensor:
        """replay_greedy for rows of which some sample at random."""
        sampling = self._graphs.sampling
        assert sampling is not None
        sampling.fill(slots)
        self._queue(self._random[filters])
        return self._buffers.results_of(slots.size)

    def replay_drafts(self, number: int, *, is_greedy: bool = False) -> Tensor:
        """Queue the drafts after `replay_random` or `write_back`, or what `replay_greedy` does and
        then drafts, in one graph: those of the smallest captured number, of which the slots take no
        more than is asked. [size, width + n]: results, then drafts."""
        key = (is_greedy, next(n for n in self._graphs.plan.draft_numbers if n >= number))
        self._queue(self._drafting[key])
        return self._drafts[key]

    def repeat(self, times: int) -> None:
        """Queue again what was replayed since `replay`, so many times, each over what was left."""
        device, postbox = self._graphs.device, self._graphs.slots.postbox
        if postbox is None and isinstance(device, RepeatingDevice):
            device.replay_times(self._replayed, times)
            return
        for _ in range(times):
            if postbox is not None:
                postbox.begin()
            for graph in self._replayed:
                graph.replay()

    def expect(self, num_rows: int, num_drafts: int, num_decodes: int) -> list[Posted]:
        """What the last so many replays tell the host of their rows by themselves, and of the last
        one's drafts; empty: nothing."""
        postbox, width = self._graphs.slots.postbox, self.width
        if postbox is None:
            return []
        earlier = [postbox.expect(num_rows, width, 0, n) for n in range(num_decodes - 1, 0, -1)]
        return [*earlier, postbox.expect(num_rows, width, num_drafts)]

    def _queue(self, graph: CapturedGraph | None) -> None:
        assert graph is not None
        graph.replay()
        self._replayed.append(graph)

    # -- what is captured -------------------------------------------------------------------------

    def compute(self) -> None:
        """From slots to hidden states."""
        graphs, state, first = self._graphs, self._graphs.slots.state, self.attention
        batches = first, *self._more.values()
        for (tables, _), batch in zip(graphs.slots.tables, batches, strict=True):
            indices = self.indices if batch is first else batch.positions
            graphs.prepare(
                *(state.rows[: self.size], tables, state.num_computed, state.newest),
                *(state.drafts, state.num_drafts, state.room, graphs.slots.block_size),
                *(state.turn if batch is first else graphs.no_turn, self.input_ids),
                *(indices, batch.slot_mapping, batch.seq_lens_dev, batch.block_tables_dev),
            )
        if graphs.offsets is not None:
            own = graphs.xp.index_select(graphs.offsets, 0, state.rows[: self.size])
            moved = self.indices.reshape([self.size, self.width]) + own.unsqueeze(1)
            # Padding stands at index 0, and offsets may be negative.
            first.positions.copy_(graphs.xp.clamp(moved.reshape([-1]), 0))
        self.context = graphs.loaded.context(graphs.caches, first, self._more)
        self.hidden = graphs.loaded.run(self.input_ids, self.context)

    def compute_logits(self) -> None:
        """From hidden states to logits."""
        self.logits = self._graphs.model.compute_logits(self.hidden)

    def sample_greedily(self) -> None:
        """From hidden states to slots."""
        graphs, model = self._graphs, self._graphs.model
        if isinstance(model, GreedyLM):
            sampled, peaks = model.greedy(self.hidden)
        else:
            logits = model.compute_logits(self.hidden)
            sampled = graphs.greedy(logits)
            peaks = graphs.xp.gather(logits, 1, sampled.unsqueeze(1)).squeeze(1)
        self.sampled, self.last = sampled, self._finish(self.size, sampled, sampled, peaks)

    def sample_at_random(self, *, filters: bool) -> None:
        """From hidden states to slots, as the sampler does it for rows without constraints."""
        graphs, sampling = self._graphs, self._graphs.sampling
        assert sampling is not None
        logits = graphs.model.compute_logits(self.hidden)
        sampled, peaks = sampling.sample(logits, self.indices, self.width, filters=filters)
        self._hand_on(sampled, self._finish(self.size, sampled, sampled, peaks))

    def write_back(self, num_rows: int, sampled: Tensor, marked: Tensor) -> Tensor:
        """What a sampler sampled that is not captured, as if `sample_greedily` had: marked tokens
        of the rows. Drafts are made for padding rows, too: what other steps have left in their
        places may be no token."""
        last = self._finish(num_rows, sampled, marked, None)
        self._hand_on(sampled, last)
        if num_rows < self.size and self._graphs.plan.draft_numbers:
            self.sampled[num_rows * self.width :] = 0
            self.last[num_rows:] = 0
        return self._buffers.results_of(num_rows)

    def _hand_on(self, sampled: Tensor, last: Tensor) -> None:
        """Put what was sampled where captured drafting looks for it, if there is any."""
        if not self._graphs.plan.draft_numbers:
            return
        self.sampled[: sampled.shape[0]].copy_(sampled)
        self.last[: last.shape[0]].copy_(last)

    def _finish(
        self, num_rows: int, sampled: Tensor, marked: Tensor, peaks: Tensor | None
    ) -> Tensor:
        """The slots take what was sampled, as far as drafts are accepted, and the results are
        marked tokens for the host, -1 after each row's last one: where in sampled that stands."""
        graphs, slots = self._graphs, self._graphs.slots
        rows, results = slots.state.rows[:num_rows], self._buffers.results[:num_rows]
        last = slots.finish(rows, sampled, marked, peaks, results)
        if graphs.kept is not None and self.width == 1:
            graphs.keep_results(rows, results, slots.state.num_computed, graphs.kept[:num_rows])
        return last


class CapturedPrompt:
    """The forward pass of up to `size` tokens. vectors: some of them have vectors."""

    def __init__(self, graphs: Graphs, size: int, vectors: CapturedVectors | None = None) -> None:
        assert graphs.prompt_buffers is not None
        buffers = self._buffers = graphs.prompt_buffers
        self.size, self._graphs, self.vectors = size, graphs, vectors
        self.attention = buffers.batch(size)
        self.input_ids, self.next_ids = buffers.input_ids[:size], buffers.next_ids[:size]
        self.indices = self.attention.positions  # no drafts are made, which alone need others
        self.last = buffers.last[: self.attention.num_seqs]
        self.context: ForwardContext | None = None
        # [rows that there can be, hidden], or with `fill` [size, hidden]; stays until the next
        # replay
        self.hidden: Tensor = None
        self._forward: CapturedGraph | None = None
        self._fill: CapturedGraph | None = None

    def capture(self, beside: CapturedGraph | None) -> CapturedGraph:
        """Run once to get ready, then capture; the memory of `beside` is used again. On a device
        where one graph serves any size running all of it would take as long as such a step, and
        nothing needs it."""
        capture, fill = self._graphs.device.capture, self._graphs.fill
        if not self._graphs.any_size:
            self.run_once()
        self._forward = capture(self.run_once, beside)
        if fill is not None:
            # Capturing computes nothing, and what the drafter's layers are given has to be numbers.
            self._forward.replay()
            fill(self)
            filled = capture(partial(fill, self), beside or self._forward)
            self._fill = filled if self._graphs.takes(filled) else None
        return self._forward

    def run(self, laid_out: LaidOut, read: np.ndarray | None) -> TargetStep:
        """Queue a step; see `forward`."""
        assert self._forward is not None and self.context is not None
        graphs, rows = self._graphs, self.context.rows
        batch, input_ids, _, axes, embedded = laid_out
        if rows is not None and read is not None:
            rows.copy_(graphs.device.to_device(padded(read, int(rows.shape[0]))))
        self._buffers.take(batch, input_ids, self.size)
        if self.vectors is not None and embedded is not None:
            self.vectors.take(embedded, axes, self.indices)
        self._forward.replay()
        hidden = self.hidden[: batch.num_tokens if read is None else read.size]
        return TargetStep(batch, self.context, input_ids, hidden, self if self._fill else None)

    def fill(self, next_ids: Tensor, last: Tensor) -> None:
        """Queue what keeps a drafter's cache complete, after `run`. See DraftBatch."""
        assert self._fill is not None
        self._buffers.take_sampled(next_ids, last)
        self._fill.replay()

    def run_once(self) -> None:
        """What is captured."""
        graphs, batch, axes = self._graphs, self.attention, None
        self.context = graphs.loaded.context(graphs.caches, batch, {})
        if graphs.fill is None:
            self.context.rows = self._buffers.read_tokens[: batch.num_seqs]
        if self.vectors is not None:
            self.context.embedded, axes = self.vectors.of(self.size)
        self.hidden = graphs.loaded.run(self.input_ids, self.context, axes)


def forward(
    graphs: Graphs | None,
    loaded: LoadedModel,
    caches: list[tuple[Tensor, ...]],
    rows: StepRows,
    laid_out: LaidOut,
    read: np.ndarray | None,
) -> TargetStep:
    """Queue a step laid out on the host, as a captured graph or operation by operation. read:
    StepRows.read_tokens, or None: hidden states of all tokens are wanted."""
    batch, input_ids, more, axes, embedded = laid_out
    sees, captured = embedded is not None, None
    if graphs is not None and (sees or axes is None):
        captured = graphs.find_prompt(rows, reads_all=read is None, sees=sees)
    if captured is not None:
        return captured.run(laid_out, read)
    context = loaded.context(caches, batch, more)
    context.rows = None if read is None else loaded.builder.device.to_device(read)
    context.embedded = embedded
    return TargetStep(batch, context, input_ids, loaded.run(input_ids, context, axes))
