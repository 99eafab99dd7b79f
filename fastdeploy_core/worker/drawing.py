"""Tokens out of logits: the plan of a batch's rows, the sampler, and the same tokens on every rank.

Nothing here waits for the device, but for rows whose sampling looks at generated text (grammars, bad
words, processors): these need the tokens of the step before, and by then the forward pass is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.sampling import columns as bits
from fastdeploy_core.sampling.columns import SamplingColumns, SamplingPlan
from fastdeploy_core.sampling.logprobs import LogprobTensors, gather
from fastdeploy_core.sampling.processors import BUILTIN_PROCESSORS
from fastdeploy_core.sampling.sampler import SamplingStep

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.small import CausalLM
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import NewSequence

    from .input_batch import InputBatch
    from .judging import RowDrafts
    from .sequence_state import SequenceState
    from .step_rows import StepRows

# Rows of logits computed at once for prompt_logprobs: a long prompt times a large vocabulary would
# not fit.
PROMPT_ROWS = 256


@dataclass(slots=True)
class Drawn:
    """What was drawn for each sampled position; tensors are on the device."""

    token_ids: Tensor  # [R] int64, always valid ids
    marked: Tensor  # [R] int64, see kernel mark_broken
    logprobs: LogprobTensors | None = None


class TokenDrawer:
    """Draws for the rows of one rank. Without `state` (ranks other than 0) it takes what rank 0 drew."""

    def __init__(
        self,
        device: DeviceBackend,
        kernels: KernelTable,
        model: CausalLM,
        batch: InputBatch,
        columns: SamplingColumns,
        state: SequenceState | None,
        communicator: Communicator | None,
    ) -> None:
        self._device, self._xp, self._model, self._batch = device, device.xp, model, batch
        self._columns, self._state, self._communicator = columns, state, communicator
        self._mark = kernels["mark_broken"]
        self._plan: SamplingPlan | None = None
        self._made_of: tuple[Any, Any] = (None, None)  # arrays that stay while the rows do

    def plan(self, rows: StepRows) -> SamplingPlan:
        """What the rows need; kept while they stay as they are."""
        plan, version, made_of = self._plan, self._columns.version, self._made_of
        is_same = made_of[0] is rows.slots and made_of[1] is rows.sample_rows
        if plan is not None and plan.version == version and is_same:
            return plan
        self._made_of = (rows.slots, rows.sample_rows)
        slots = rows.slots if rows.is_decode else rows.slots[rows.sample_rows]
        if plan is None or not plan.matches(self._columns, slots):
            plan = self._plan = SamplingPlan(self._columns, slots, self._device)
        return plan

    def draw(
        self,
        logits: Tensor,
        rows: StepRows,
        plan: SamplingPlan,
        errors: dict[int, str],
        read_before: Callable[[], None],
        drafts: RowDrafts | None = None,
        positions: Tensor | None = None,
    ) -> Drawn:
        """One token per row of logits. `errors` gets what the host finds out, by row of logits;
        `read_before` brings the tokens of earlier steps to the host. `positions`: where the tokens will
        stand, if only the device knows."""
        communicator = self._communicator
        if self._state is not None:
            drawn = self._lead(logits, rows, plan, errors, read_before, drafts, positions)
            if communicator is not None:
                return self._same_everywhere(communicator, drawn.marked, drawn.logprobs)
            return drawn
        ids = self._xp.zeros((plan.num_rows,), dtype=self._xp.int64, device=self._device.device)
        return Drawn(ids, ids) if communicator is None else self._same_everywhere(communicator, ids)

    @staticmethod
    def _same_everywhere(
        communicator: Communicator, marked: Tensor, logprobs: LogprobTensors | None = None
    ) -> Drawn:
        """What rank 0 drew. Every rank has to know what is broken, since it ends a row of drafts."""
        marked = communicator.broadcast(marked, 0)
        return Drawn(marked * (marked >= 0).to(marked.dtype), marked, logprobs)

    def draw_padded(self, logits: Tensor, plan: SamplingPlan, positions: np.ndarray) -> Drawn:
        """The likeliest token of every row of a padded step, the same on every rank. Those behind the
        plan's rows go nowhere."""
        if self._state is not None:
            sampled = self._state.sampler.greedy(logits)
            marked = self._mark(sampled.token_ids, sampled.peak.reshape([-1]), None)
            drawn = Drawn(sampled.token_ids, marked)
        else:
            ids = self._xp.zeros(
                (logits.shape[0],), dtype=self._xp.int64, device=self._device.device
            )
            drawn = Drawn(ids, ids)
        if self._communicator is not None:
            drawn = self._same_everywhere(self._communicator, drawn.marked)
        batch = self._batch
        slots = np.full(logits.shape[0], batch.max_num_seqs, dtype=np.int64)
        slots[: plan.num_rows] = plan.slots
        batch.sampled(plan.slots, self._device.to_device(slots), positions, drawn.token_ids)
        return drawn

    def _lead(
        self,
        logits: Tensor,
        rows: StepRows,
        plan: SamplingPlan,
        errors: dict[int, str],
        read_before: Callable[[], None],
        drafts: RowDrafts | None,
        positions: Tensor | None,
    ) -> Drawn:
        state, batch = self._state, self._batch
        assert state is not None
        if plan.is_plain:
            sampled = state.sampler.greedy(logits)
        else:
            if plan.flags & bits.HOST:
                read_before()
            num_output = rows.sample_positions - batch.num_prompt[plan.slots]
            where = rows.sample_positions if positions is None else positions
            step = SamplingStep(where, num_output, batch.output_tokens)
            if drafts is not None:
                step.drafts, step.drafts_dev = drafts.ids, drafts.on_device
            sampled = state.sampler.sample(logits, plan, step)
            errors.update(sampled.errors)
        marked = self._mark(sampled.token_ids, sampled.peak.reshape([-1]), sampled.possible)
        return Drawn(sampled.token_ids, marked, sampled.logprobs)

    def count_kept(self, plan: SamplingPlan, drawn: Tensor, kept: Tensor) -> None:
        """Behind drafts: remember for penalties which of the drawn tokens have come to stay."""
        if self._state is not None and plan.flags & bits.PENALTY:
            self._state.sampler.count(plan, drawn, kept)

    def wants_prompt_logprobs(self, rows: StepRows) -> np.ndarray:
        """Which rows do of this step: the same ones on every rank. Their hidden states are all read."""
        if rows.is_decode:
            return np.zeros(0, dtype=np.int64)
        wanted = self._columns.flags[rows.slots] & bits.PROMPT_LOGPROBS != 0
        wanted &= rows.starts < self._batch.num_prompt[rows.slots] - 1
        return np.flatnonzero(wanted)

    def prompt_logprobs(self, hidden: Tensor, rows: StepRows) -> list[tuple[int, LogprobTensors]]:
        """For rows that want them: every prompt token that this chunk predicts, by batch row. hidden: [T, hidden]
        if there are any."""
        found: list[tuple[int, LogprobTensors]] = []
        first = rows.first_tokens()
        for row in self.wants_prompt_logprobs(rows).tolist():
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            end = min(int(rows.seq_lens[row]), int(self._batch.num_prompt[slot]) - 1)
            for begin in range(start, end, PROMPT_ROWS):
                stop = min(begin + PROMPT_ROWS, end)
                offset = int(first[row]) - start
                logits = self._model.compute_logits(hidden[offset + begin : offset + stop])
                if self._state is not None:
                    found.append((row, self._prompt_chunk(logits, slot, begin, stop)))
        return found

    def _prompt_chunk(self, logits: Tensor, slot: int, begin: int, stop: int) -> LogprobTensors:
        assert self._state is not None
        values = self._state.sampler.log_probabilities(logits)
        targets = self._batch.token_ids[slot, begin + 1 : stop + 1].astype(np.int64)
        count = int(self._columns.num_prompt_logprobs[slot])
        return gather(
            self._device,
            values,
            self._device.to_device(targets),
            np.arange(stop - begin),
            np.full(stop - begin, count),
        )


def has_processors(config: EngineConfig) -> bool:
    """Whether there are logits processors of plugins, which may look at any text."""
    return any(name not in BUILTIN_PROCESSORS for name in config.logits_processors)


def is_simple(new: NewSequence, config: EngineConfig) -> bool:
    """Whether a sequence wants its likeliest tokens and nothing else, by what every rank knows of it."""
    params = new.sampling
    return (
        params.is_greedy
        and params.is_unconstrained
        and params.logprobs is None
        and new.grammar is None
        and not has_processors(config)
    )
