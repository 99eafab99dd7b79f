"""One step on one rank: message -> batch -> attention metadata -> forward -> logits -> tokens.

A step is launched without waiting for the one before: newest tokens stay on the device and feed the
next step there. Decode steps replay a recording (step_graphs.py) where the device and its drivers can;
others build their batch on the host. Tokens out of logits are drawing.py's, results reading.py's.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.errors import RequestError, WorkerError
from fastdeploy_core.sampling.columns import FILTER, SamplingColumns, SamplingPlan
from fastdeploy_core.types import NewSequence, SchedulerOutput

from .caches import Caches
from .device_slots import DeviceSlots
from .drawing import TokenDrawer, has_processors, is_simple
from .failures import raise_if_device_failed
from .input_batch import InputBatch
from .judging import DraftJudge
from .multi_step import KeptResults, max_decodes
from .pending import Launched, PendingOutput
from .prompt_graphs import forward
from .reading import NOT_KEPT, StepReader
from .recorded_draws import RECORDED, RecordedDraws, can_record_draws
from .recorded_sizes import prompt_sizes
from .recorded_step import RecordedStep
from .sequence_state import SequenceState
from .speculation import Speculation, recorded_widths
from .staging import wait_for
from .step_graphs import StepGraphs
from .step_shapes import StepShapes

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.tensor import Tensor

    from .drafters import Drafters
    from .step_rows import StepRows

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the batch, the caches and the sampler of one rank. Calls may come from two threads."""

    def __init__(
        self,
        config: EngineConfig,
        device: DeviceBackend,
        kernels: KernelTable,
        loaded: LoadedModel,
        rank: int = 0,
        communicator: Communicator | None = None,
        graph_sizes: tuple[int, ...] = (),
        drafters: Drafters | None = None,
    ) -> None:
        self._config, self._device, self._xp = config, device, device.xp
        self.vocab_size = loaded.shapes.vocab_size
        self._rank, self._kernels, self._loaded, self._model = rank, kernels, loaded, loaded.model
        self._columns = SamplingColumns(config.batch.max_num_seqs, loaded.shapes.vocab_size)
        # Ranks other than 0 only need the tokens that rank 0 draws.
        self._state: SequenceState | None = None
        parts: list[Any] = [self._columns]
        if rank == 0:
            self._state = SequenceState(config, device, kernels, self._columns, loaded.load_driver)
            parts += self._state.parts
        speculative = config.speculative
        self._max_drafts = 0 if speculative is None else speculative.num_speculative_tokens
        self.shapes = StepShapes.of(config, device.limits)
        batch = self.batch = InputBatch(
            device,
            config.batch.max_num_seqs,
            config.model.max_model_len,
            config.cache.block_size,
            parts,
            self._max_drafts,
            self.shapes,
        )
        self._lock = threading.RLock()
        self._drawer = TokenDrawer(
            device, kernels, loaded.model, batch, self._columns, self._state, communicator
        )
        self._judge = DraftJudge(
            device, batch, refuses_all=speculative is not None and speculative.benchmark_mode
        )
        self._draws = RecordedDraws(device, kernels, self._columns, config.batch.max_num_seqs)
        self._speculation: Speculation | None = None
        if drafters is not None and speculative is not None:
            parts = [self._columns, self._state, communicator, drafters, kernels, speculative]
            self._speculation = Speculation(device, loaded, batch, self._draws, *parts)
        self._reader = StepReader(device, batch, self._state, self._lock, self._speculation)
        self._slots: DeviceSlots | None = None
        self._graphs: StepGraphs | None = None
        self._kept: KeptResults | None = None
        self.max_decodes = 1  # see WorkerInfo
        if graph_sizes:
            self._graphs = self._make_graphs(graph_sizes, communicator)
        self._num_ranks = 1 if communicator is None else communicator.world_size
        self._is_simple = np.zeros(config.batch.max_num_seqs, dtype=bool)  # see is_simple()
        self._refused: dict[int, str] = {}  # by seq_id: what their parameters lack
        self.caches = Caches(device, kernels, loaded)

    def _make_graphs(self, sizes: tuple[int, ...], communicator: Communicator | None) -> StepGraphs:
        """Recordings to be made, and the device's own state of the sequences that they work on."""
        config, speculation, loaded = self._config, self._speculation, self._loaded
        # One rank knows what all rows need.
        can_draw = communicator is None and can_record_draws(self._device, self._kernels)
        if can_draw and max(sizes) >= config.batch.max_num_seqs:
            self.max_decodes = max_decodes(config, self._device)
        slots = self._slots = DeviceSlots(
            self._device,
            self.batch,
            self._max_drafts,
            kernels=self._kernels,
            vocab_size=self.vocab_size,
            refuses_drafts=self._judge.refuses_all,
            keeps_history=speculation is not None and speculation.reads_history,
            max_decodes=self.max_decodes,
        )
        self.batch.watch(slots)
        if self.max_decodes > 1 and slots.postbox is None:
            self._kept = KeptResults(self._device, self._kernels, max(sizes), self.max_decodes)
        return StepGraphs(
            self._device,
            self._kernels,
            self._loaded,
            slots,
            sizes,
            block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len,
            widths=recorded_widths(config.speculative),
            communicator=communicator,
            draft_numbers=() if speculation is None else speculation.recorded_numbers(),
            # A drafter that reads histories draws nothing.
            drafts_at_random=slots.history is None,
            propose=None if speculation is None else partial(speculation.propose_recorded, slots),
            fill=None if speculation is None else speculation.recorded_fill,
            prompt_sizes=prompt_sizes(
                config, self._device.limits, loaded.attention.values(), loaded.builder.expert_ranks
            ),
            draws=self._draws if can_draw else None,
            kept=self._kept,
        )

    @property
    def records_drafts(self) -> bool:
        """See WorkerInfo."""
        return self._graphs is not None and self._speculation is not None

    @property
    def max_rows_ahead(self) -> int:
        """WorkerInfo.max_rows_ahead: of decode steps that wait for no host drafter and no processors."""
        speculation, speculative = self._speculation, self._config.speculative
        if self._graphs is None or speculation is None or not speculation.leaves_drafts:
            return 0
        assert speculative is not None
        if speculative.acceptance != "lossless" or has_processors(self._config):
            return 0
        return max(self._graphs.sizes)

    def allocate_cache(
        self, num_blocks: int, num_host_blocks: int, *, is_touched: bool = True
    ) -> None:
        """Zeroed caches of every layer; what was there before is dropped first. See Caches.allocate."""
        self._drop_cache()
        self.caches.allocate(num_blocks, num_host_blocks, is_touched=is_touched)

    def free_cache(self) -> None:
        """Drop caches and every sequence."""
        for seq_id in list(self.batch.slot_of):
            self.batch.remove(seq_id)
            if self._speculation is not None:
                self._speculation.forget(seq_id)
        self._reader.clear()
        self._drop_cache()

    def _drop_cache(self) -> None:
        if self._graphs is not None:
            self._graphs.drop()
        self.caches.drop()

    def record_graphs(self) -> None:
        """Record decode steps over the caches there are, if steps are to be recorded."""
        if self._graphs is not None:
            with self._xp.no_grad():
                self._graphs.record(self.caches.tensors, is_first_rank=self._rank == 0)

    def rehearse_graphs(self) -> None:
        """Run what record_graphs() will record, over the caches there are."""
        if self._graphs is not None:
            with self._xp.no_grad():
                self._graphs.rehearse(self.caches.tensors)

    def graph_bytes(self) -> int:
        """What record_graphs() will take, measured over the caches there are."""
        if self._graphs is None:
            return 0
        with self._xp.no_grad():
            return self._graphs.estimate(self.caches.tensors)

    def launch(self, step: SchedulerOutput) -> PendingOutput:
        """Queue the step. WorkerError: this rank is lost or was told nonsense; ResourceError: the
        step did not fit into device memory, and smaller ones may; anything else: as it came."""
        try:
            with self._xp.no_grad():
                return self._launch(step)
        except Exception as error:
            # A lost device fails whatever is asked of it, which would hide why.
            if self._slots is not None and not self._device.is_lost(error):
                self._slots.forget()
            raise_if_device_failed(self._device, self._rank, step.step_id, error)
            raise

    def _launch(self, step: SchedulerOutput) -> PendingOutput:
        began = time.perf_counter()
        with self._lock:
            launched = self._take(step)
            if not launched.rows.slots.size:
                launched.is_read = True
                launched.launch_s = time.perf_counter() - began
                return PendingOutput(launched, self._read)
            recorded = self._find_recorded(launched)
            if recorded is None and self._slots is not None:
                self._slots.fall_behind(launched.rows)
        forward_began = time.perf_counter()
        logits: Tensor | None = None
        if recorded is None:
            logits = self._compute(launched)
        else:
            recorded.replay()
        launched.model_s = time.perf_counter() - forward_began
        with self._lock:
            results: Tensor | None = None
            if recorded is not None or logits is not None:
                results = self._draw(launched, logits, recorded)
            if (
                not self._rank
            ):  # under the same lock: a reader takes the last unread one for the newest
                self._reader.expect(launched)
        drafts = None
        if self._speculation is not None and launched.concerns_drafters:
            drafts = self._speculation.propose(launched, recorded, self._slots)
        if recorded is not None and launched.rows.num_decodes > 1:
            recorded.repeat(launched.rows.num_decodes - 1)
            if self._kept is not None:
                results = self._kept.of(launched.rows.slots.size)
        with self._lock:
            if self._rank:  # rank 0 answers; this one only keeps the tokens on its device
                launched.event, launched.is_read = self._device.record_event(), True
            else:
                self._reader.start(launched, results, drafts, recorded)
        launched.launch_s = time.perf_counter() - began
        return PendingOutput(launched, self._read)

    def _take(self, step: SchedulerOutput) -> Launched:
        """Take over what the message says."""
        batch = self.batch
        for seq_id in step.finished_seq_ids:
            batch.remove(seq_id)
            self._refused.pop(seq_id, None)
            if self._speculation is not None:
                self._speculation.forget(seq_id)
        for new in step.new_sequences:
            self._add(new)
        self.caches.move(step.copies)
        rows = batch.rows(step)
        launched = Launched(step.step_id, rows, batch.owner[rows.slots], max_drafts=step.max_drafts)
        for row, seq_id in enumerate(batch.seq_ids[rows.slots].tolist()) if self._refused else ():
            if seq_id in self._refused:
                launched.errors[row] = self._refused[seq_id]
        return launched

    def _find_recorded(self, launched: Launched) -> RecordedStep | None:
        """A recording that can run the step; the device's slots are then as the step needs them."""
        rows, graphs, slots = launched.rows, self._graphs, self._slots
        if graphs is None or slots is None:
            return None
        width = 1 if rows.is_decode else 1 + rows.most_drafts()
        if width == 1 and not rows.is_decode:
            return None
        recorded = graphs.find(rows.slots.size, width)
        if recorded is None and (rows.is_ahead or rows.num_decodes > 1):
            raise WorkerError(f"no recorded step takes {rows.slots.size} rows without the host")
        fits = rows.is_decode or rows.is_ahead or rows.fits(self._max_drafts)
        if recorded is None or not fits:
            return None
        slots.sync(rows, recorded.size, launched.max_drafts)
        if not rows.is_decode and not (rows.is_ahead and width == recorded.width):
            launched.rows = rows.widen(recorded.width)
        return recorded

    def _compute(self, launched: Launched) -> Tensor | None:
        """A step whose batch is built on the host: logits of the sampled positions, if there are any."""
        rows = launched.rows
        with self._lock:
            attention, token_slots, positions = self.batch.attention_batch(rows)
            input_ids = self.batch.input_ids(rows, token_slots, positions)
        read, reads_all = rows.read_tokens(), self._reads_all_hidden(rows)
        step = rows, attention, input_ids, None if reads_all else read
        launched.target = forward(self._graphs, self._loaded, self.caches.tensors, *step)
        hidden = launched.target.hidden
        launched.prompt_logprobs = self._drawer.prompt_logprobs(hidden, rows)
        if not rows.sample_tokens.size:
            return None
        if reads_all and read is not None:
            hidden = self._xp.index_select(hidden, 0, self._device.to_device(read))
        return self._model.compute_logits(hidden)

    def _reads_all_hidden(self, rows: StepRows) -> bool:
        """Whether hidden states are read of tokens that are not sampled, too; the same on every rank."""
        is_drafted_from = self._speculation is not None and self._speculation.reads_hidden
        return is_drafted_from or bool(self._drawer.wants_prompt_logprobs(rows).size)

    def _draw(
        self, launched: Launched, logits: Tensor | None, recorded: RecordedStep | None
    ) -> Tensor:
        """Tokens of the sampled positions, on the device; the next step finds them there."""
        batch, rows, num_rows = self.batch, launched.rows, launched.rows.slots.size
        plan = launched.plan = self._drawer.plan(rows)
        if recorded is not None and self._slots is not None:
            self._slots.advance(rows)
            if self._is_plain(plan, rows):
                drafting = self._speculation
                both = None if drafting is None else drafting.draw_and_draft(launched, recorded)
                return recorded.replay_greedy(num_rows) if both is None else both.values
            if recorded.draws_at_random and not plan.flags & ~RECORDED:
                return recorded.replay_random(rows.slots, filters=bool(plan.flags & FILTER))
            logits = recorded.replay_head(num_rows)
        if recorded is None and rows.shape is not None and logits is not None:
            if self._is_simple[rows.slots].all() and not rows.num_drafts.any():
                drawn = self._drawer.draw_padded(logits, plan, rows.sample_positions)
                launched.drawn = drawn.token_ids
                return drawn.marked
            logits = logits[: plan.num_rows]
        drafts = None if rows.is_ahead else self._judge.drafts_of(rows, plan)
        launched.draft_ids = None if drafts is None else drafts.ids
        positions: Tensor | None = None
        if recorded is not None and rows.is_ahead:
            positions = recorded.attention.positions[: plan.num_rows] + 1
        drawn = self._drawer.draw(
            *(logits, rows, plan, launched.sample_errors, self._reader.read_all, drafts, positions)
        )
        launched.sampled_logprobs, launched.drawn = drawn.logprobs, drawn.token_ids
        if recorded is not None:
            results = recorded.write_back(num_rows, drawn.token_ids, drawn.marked)
            if drafts is not None:
                self._drawer.count_kept(plan, drawn.token_ids, results.reshape([-1]) != NOT_KEPT)
            return results
        if drafts is None:
            if self._slots is not None:
                self._slots.take_drawn(rows, drawn.token_ids, launched.max_drafts)
            batch.sampled(plan.slots, plan.slots_dev, rows.sample_positions, drawn.token_ids)
            return drawn.marked
        verdict = self._judge.judge(drafts, drawn.token_ids)
        launched.accepted = verdict.num_accepted
        self._drawer.count_kept(plan, drawn.token_ids, verdict.kept)
        if self._slots is not None:
            self._slots.take_drawn(rows, drawn.token_ids, launched.max_drafts)
        slots = plan.slots[drafts.layout.first]
        batch.drawn_behind_drafts(slots, self._device.to_device(slots), verdict.next_ids)
        return verdict.mark(drawn.marked)

    def _is_plain(self, plan: SamplingPlan, rows: StepRows) -> bool:
        """Whether the likeliest tokens are all that is wanted. Ranks must agree on it, although rank 0
        alone knows everything."""
        if self._num_ranks == 1:
            return plan.is_plain
        return bool(self._is_simple[rows.slots].all())

    def _add(self, new: NewSequence) -> None:
        slot = self.batch.add(new)
        self._is_simple[slot] = is_simple(new, self._config)
        self._refused.pop(new.seq_id, None)
        self._columns.add(slot, new.sampling, new.seed)
        if self._state is None:
            return
        try:
            self._state.add(slot, new)
        except RequestError as error:
            self._refused[new.seq_id] = f"invalid_request: {error}"
        except Exception as error:  # a plugin's own failure costs its request only
            logger.exception("sequence %s cannot be sampled as asked", new.seq_id)
            self._refused[new.seq_id] = f"sampling_setup_failed: {type(error).__name__}"

    def _read(self, launched: Launched) -> None:
        try:
            wait_for(launched.event)  # without the lock
            self._reader.read_until(launched)
        except Exception as error:
            raise_if_device_failed(self._device, self._rank, launched.step_id, error)
            raise
