"""One step on one rank: message -> batch -> attention metadata -> forward -> logits -> tokens.

A step is launched without waiting for the one before: newest tokens stay on the device and feed the
next step there. Only rows whose sampling looks at generated text (grammar, bad words, processors)
make the launch wait for the previous step, and then only after the forward pass has been queued.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.contracts.attention import cache_dtypes
from fastdeploy_core.errors import RequestError, ResourceError, WorkerError
from fastdeploy_core.layers.context import ForwardContext
from fastdeploy_core.sampling import columns as bits
from fastdeploy_core.sampling.columns import SamplingColumns, SamplingPlan
from fastdeploy_core.sampling.logprobs import gather, read
from fastdeploy_core.sampling.processors import BUILTIN_PROCESSORS
from fastdeploy_core.sampling.sampler import Sampled, SamplingStep
from fastdeploy_core.types import BlockCopies, NewSequence, SchedulerOutput

from .host_tier import BlockMover
from .input_batch import InputBatch, StepRows
from .pending import Launched, PendingOutput
from .sequence_state import SequenceState

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

    from .loader import LoadedModel

logger = logging.getLogger(__name__)

NAN = "nan_logits"
FORBIDDEN = "no_possible_token"
NOT_IN_GRAMMAR = "grammar_violation"
# Rows of logits computed at once for prompt_logprobs: a long prompt times a large vocabulary would
# not fit.
PROMPT_ROWS = 256


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
    ) -> None:
        self._config, self._device, self._xp = config, device, device.xp
        self.vocab_size = loaded.shapes.vocab_size
        self._kernels, self._loaded, self._model = kernels, loaded, loaded.model
        self._rank, self._communicator = rank, communicator
        self._columns = SamplingColumns(config.batch.max_num_seqs, loaded.shapes.vocab_size)
        # Ranks other than 0 only need the tokens that rank 0 draws.
        self._state: SequenceState | None = None
        parts: list[Any] = [self._columns]
        if rank == 0:
            self._state = SequenceState(config, device, kernels, self._columns)
            parts += self._state.parts
        self.batch = InputBatch(
            device,
            config.batch.max_num_seqs,
            config.model.max_model_len,
            config.cache.block_size,
            parts,
        )
        self._refused: dict[int, str] = {}  # by seq_id: what their parameters lack
        self._caches: list[tuple[Tensor, ...]] = []
        self._mover: BlockMover | None = None
        self._plan: SamplingPlan | None = None
        self._unread: deque[Launched] = deque()
        self._lock = threading.RLock()

    # -- cache ------------------------------------------------------------------------------------

    def cache_shapes(self, num_blocks: int) -> list[list[tuple[tuple[int, ...], str]]]:
        """(shape, dtype) of each tensor of each layer's cache."""
        layers = []
        for spec in self._loaded.kv_layers:
            shapes = self._loaded.attention[spec].cache_shapes(num_blocks)
            layers.append(list(zip(shapes, cache_dtypes(spec, len(shapes)), strict=True)))
        return layers

    def allocate_cache(self, num_blocks: int, num_host_blocks: int) -> None:
        """Zeroed caches of every layer; what was there before is dropped first."""
        xp, device = self._xp, self._device
        self._mover, self._caches = None, []
        self._caches = [
            tuple(xp.zeros(s, dtype=xp.dtype(dtype), device=device.device) for s, dtype in layer)
            for layer in self.cache_shapes(num_blocks)
        ]
        self._mover = BlockMover(device, self._kernels, self._caches, num_host_blocks)

    def free_cache(self) -> None:
        """Drop caches and every sequence."""
        for seq_id in list(self.batch.slot_of):
            self.batch.remove(seq_id)
        self._unread.clear()
        self._mover, self._caches = None, []

    # -- a step -----------------------------------------------------------------------------------

    def launch(self, step: SchedulerOutput) -> PendingOutput:
        """Queue the step. WorkerError: this rank is lost or was told nonsense; ResourceError: the
        step did not fit into device memory, and smaller ones may; anything else: as it came."""
        try:
            with self._xp.no_grad():
                return self._launch(step)
        except Exception as error:
            self._raise_if_device_failed(error, step.step_id)
            raise

    def _launch(self, step: SchedulerOutput) -> PendingOutput:
        began = time.perf_counter()
        with self._lock:
            launched, batch = self._prepare(step)
        if batch is None:
            launched.is_read = True
            launched.launch_s = time.perf_counter() - began
            return PendingOutput(launched, self.read_until, None)
        # Without the lock: where the forward pass runs at once, the tokens of the step before can
        # be read meanwhile.
        forward_began = time.perf_counter()
        context = self._context(batch[1])  # an attention driver's preparation is part of attending
        hidden = self._model.forward(batch[0], batch[1].positions, context)
        logits = self._sample_logits(hidden, launched.rows)
        launched.model_s = time.perf_counter() - forward_began
        self._prompt_logprobs(launched, hidden, batch[1])
        with self._lock:
            if logits is not None:
                self._sample(launched, logits)
            self._unread.append(launched)
            if launched.rows.num_drafts.any():
                self.read_until(launched)  # how many were right decides the next positions
            if self._rank:  # rank 0 answers; this one only keeps the tokens on its device
                self._unread.clear()
                launched.is_read, launched.sequences = True, ()
        event = self._device.record_event()
        launched.launch_s = time.perf_counter() - began
        return PendingOutput(launched, self.read_until, event)

    def _prepare(
        self, step: SchedulerOutput
    ) -> tuple[Launched, tuple[Tensor, AttentionBatch] | None]:
        """Take over what the message says; None when there is nothing to run."""
        batch = self.batch
        for seq_id in step.finished_seq_ids:
            batch.remove(seq_id)
            self._refused.pop(seq_id, None)
        for new in step.new_sequences:
            self._add(new)
        self._move_blocks(step.copies)
        rows = batch.rows(step.sequences, self._cannot_judge_drafts)
        launched = Launched(step.step_id, step.sequences, rows, batch.owner[rows.slots])
        for row, sequence in enumerate(step.sequences) if self._refused else ():
            if sequence.seq_id in self._refused:
                launched.errors[row] = self._refused[sequence.seq_id]
        if not step.sequences:
            return launched, None
        attention, token_slots, positions = batch.attention_batch(rows)
        return launched, (batch.input_ids(rows, token_slots, positions), attention)

    def _add(self, new: NewSequence) -> None:
        slot = self.batch.add(new)
        self._refused.pop(new.seq_id, None)
        # The same on every rank, whatever rank 0's plugins say: rows are expanded by drafts alike.
        self._columns.add(slot, new.sampling, new.seed, looks_back(new, self._config))
        if self._state is None:
            return
        try:
            self._state.add(slot, new)
        except RequestError as error:
            self._refused[new.seq_id] = f"invalid_request: {error}"
        except Exception as error:  # a plugin's own failure costs its request only
            logger.exception("sequence %s cannot be sampled as asked", new.seq_id)
            self._refused[new.seq_id] = f"sampling_setup_failed: {type(error).__name__}"

    def _move_blocks(self, copies: BlockCopies) -> None:
        if copies.device_to_host or copies.host_to_device or copies.device_to_device:
            if self._mover is None:
                raise WorkerError("a step copies blocks before the cache was allocated")
            self._mover.apply(copies)

    def _context(self, attention: AttentionBatch) -> ForwardContext:
        metadata = {
            spec: backend.prepare(attention) for spec, backend in self._loaded.attention.items()
        }
        return ForwardContext(attention, metadata, self._caches)

    def _sample_logits(self, hidden: Tensor, rows: StepRows) -> Tensor | None:
        """Logits of the sampled positions; None when this step samples nothing."""
        if not rows.sample_tokens.size:
            return None
        if not rows.is_decode or hidden.shape[0] != rows.slots.size:
            index = self._device.to_device(rows.sample_tokens)
            hidden = self._xp.index_select(hidden, 0, index)
        return self._model.compute_logits(hidden)

    def _sample(self, launched: Launched, logits: Tensor) -> None:
        batch, rows = self.batch, launched.rows
        slots = rows.slots if rows.is_decode else rows.slots[rows.sample_rows]
        plan = self._plan
        if plan is None or not plan.matches(self._columns, slots):
            plan = self._plan = SamplingPlan(self._columns, slots, self._device)
        launched.plan = plan
        if self._state is not None and plan.is_plain:
            sampled = self._state.sampler.greedy(logits)
        elif self._state is not None:
            if plan.flags & bits.HOST:
                self.read_until(self._unread[-1] if self._unread else None)
            num_output = rows.sample_positions - batch.num_prompt[slots]
            step = SamplingStep(rows.sample_positions, num_output, batch.output_tokens)
            sampled = self._state.sampler.sample(logits, plan, step)
            for row, error in sampled.errors.items():
                launched.errors[int(rows.sample_rows[row])] = error
        else:
            ids = self._xp.zeros((slots.size,), dtype=self._xp.int64, device=self._device.device)
            sampled = Sampled(ids, ids)
        if self._communicator is not None:
            sampled.token_ids = self._communicator.broadcast(sampled.token_ids, 0)
        launched.sampled = sampled
        if not rows.num_drafts.any():
            batch.sampled(slots, plan.slots_dev, rows.sample_positions, sampled.token_ids)

    def _prompt_logprobs(
        self, launched: Launched, hidden: Tensor, attention: AttentionBatch
    ) -> None:
        """For rows that want them: every prompt token that this chunk predicts."""
        rows, batch = launched.rows, self.batch
        if rows.is_decode:
            return
        wanted = self._columns.flags[rows.slots] & bits.PROMPT_LOGPROBS
        for row in np.flatnonzero(wanted).tolist():
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            end = min(int(rows.seq_lens[row]), int(batch.num_prompt[slot]) - 1)
            first = int(attention.cu_seqlens_q[row])
            for begin in range(start, end, PROMPT_ROWS):
                stop = min(begin + PROMPT_ROWS, end)
                part = hidden[first + begin - start : first + stop - start]
                logits = self._model.compute_logits(part)
                if self._state is None:
                    continue
                values = self._state.sampler.log_probabilities(logits)
                targets = batch.token_ids[slot, begin + 1 : stop + 1].astype(np.int64)
                count = int(self._columns.num_prompt_logprobs[slot])
                tensors = gather(
                    self._device,
                    values,
                    self._device.to_device(targets),
                    np.arange(stop - begin),
                    np.full(stop - begin, count),
                )
                launched.prompt_logprobs.append((row, tensors))

    def _cannot_judge_drafts(self, slots: np.ndarray) -> np.ndarray:
        """Rows whose later positions depend on what was generated before them."""
        return self._columns.looks_back[slots]

    # -- reading tokens ---------------------------------------------------------------------------

    def read_until(self, last: Launched | None) -> None:
        """Bring the tokens of every step up to `last` to the host, in order of launch."""
        if last is None or last.is_read:
            return
        try:
            with self._lock:
                while not last.is_read:
                    self._read(self._unread.popleft())
        except Exception as error:
            self._raise_if_device_failed(error, last.step_id)
            raise

    def _read(self, launched: Launched) -> None:
        rows, sampled, plan = launched.rows, launched.sampled, launched.plan
        if sampled is not None and plan is not None:
            ids = launched.token_ids = self._device.to_host(sampled.token_ids).copy()
            if self._state is not None:
                self._find_broken_rows(launched, sampled)
            if rows.num_drafts.any():
                self._judge_drafts(launched, ids)
            self._learn(launched, ids, plan)
            if sampled.logprobs is not None:
                records = read(self._device, sampled.logprobs)
                launched.logprobs = dict(zip(sampled.logprobs.rows.tolist(), records, strict=True))
        for row, tensors in launched.prompt_logprobs:
            records = read(self._device, tensors)
            if not all(math.isfinite(value) for record in records for value in record.logprobs):
                launched.errors[row] = NAN
            launched.prompt_rows.setdefault(row, []).extend(records)
        launched.is_read = True  # last: another thread may be looking at it without the lock

    def _find_broken_rows(self, launched: Launched, sampled: Sampled) -> None:
        for values, error in ((sampled.possible, FORBIDDEN), (sampled.peak, NAN)):
            if values is None:
                continue
            broken = ~np.isfinite(self._device.to_host(values)).reshape(-1)
            if broken.any():
                for row in launched.rows.sample_rows[broken].tolist():
                    launched.errors[row] = error

    def _judge_drafts(self, launched: Launched, ids: np.ndarray) -> None:
        """A draft is right when it is what was drawn at its position, given the drafts before it."""
        rows = launched.rows
        accepted = launched.num_accepted = np.zeros(rows.slots.size, dtype=np.int64)
        num_samples = np.bincount(rows.sample_rows, minlength=rows.slots.size)
        first = np.cumsum(num_samples) - num_samples
        for row in np.flatnonzero(rows.num_judged * num_samples).tolist():
            drafts = launched.sequences[row].draft_token_ids
            drawn = ids[first[row] : first[row] + len(drafts)]
            wrong = np.flatnonzero(drawn != drafts)
            accepted[row] = wrong[0] if wrong.size else len(drafts)

    def _learn(self, launched: Launched, ids: np.ndarray, plan: SamplingPlan) -> None:
        """Write tokens into the history of sequences that are still here, and advance grammars."""
        batch, rows = self.batch, launched.rows
        slots, positions = plan.slots, rows.sample_positions
        # A slot may have changed hands since the launch.
        kept = batch.owner[rows.slots] == launched.owners
        if not rows.is_decode:
            kept = kept[rows.sample_rows]
        if launched.num_accepted is not None:
            nth = positions - (rows.seq_lens - rows.num_drafts)[rows.sample_rows]
            kept &= nth <= launched.num_accepted[rows.sample_rows]
        if not kept.all():
            slots, positions, ids = slots[kept], positions[kept], ids[kept]
        batch.learn(slots, positions, ids)
        if launched.num_accepted is not None:
            batch.newest[slots] = positions  # rows are in order: the last accepted one stays
        if plan.flags & bits.GRAMMAR and self._state is not None:
            kept_rows = rows.sample_rows[kept].tolist()
            for row, slot, token in zip(kept_rows, slots.tolist(), ids.tolist(), strict=True):
                if row not in launched.errors and not self._state.advance(slot, token):
                    launched.errors[row] = NOT_IN_GRAMMAR

    def _raise_if_device_failed(self, error: Exception, step_id: int) -> None:
        """What the device's library raised, in this project's terms; anything else is the step's."""
        if self._device.is_oom(error):
            raise ResourceError(
                f"device memory ran out in step {step_id}; lower --gpu-memory-utilization, "
                "--max-num-batched-tokens or --max-num-seqs"
            ) from error
        if self._device.is_lost(error):
            what = f"{type(error).__name__}: {error}"
            raise WorkerError(
                f"the device of rank {self._rank} is lost in step {step_id}: {what}"
            ) from error


def looks_back(new: NewSequence, config: EngineConfig) -> bool:
    """Whether sampling this sequence depends on the tokens it generated, beyond its logits."""
    params = new.sampling
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.bad_words_token_ids
        or new.grammar is not None
        or params.thinking_token_budget is not None
        or params.logits_processors_args
        or any(name not in BUILTIN_PROCESSORS for name in config.logits_processors)
    )
