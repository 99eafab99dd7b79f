"""Tokens out of logits: the plan of a batch's rows, the sampler, and the same tokens on every rank.

Nothing here waits for the device, but for rows whose sampling looks at generated text (grammars,
bad words, processors): these need the tokens of the step before, and by then the forward pass is
queued."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.contracts.speculative import NO_DRAFT
from fastdeploy_core.reference.ops import sampling as ops_sampling
from fastdeploy_core.sampling import columns as bits
from fastdeploy_core.sampling.columns import SamplingColumns, SamplingPlan
from fastdeploy_core.sampling.logprobs import LogprobTensors, gather
from fastdeploy_core.sampling.sampler import SamplingStep
from fastdeploy_core.sampling.state import SamplingState

from .results import FOUND_BEFORE
from .step import Sampling, StepRows

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.small import CausalLM
    from fastdeploy_core.tensor import Tensor

    from .slots import Slots

# Rows of logits computed at once for prompt_logprobs: a long prompt times a large vocabulary would
# not fit.
PROMPT_ROWS = 256


class StepSampler:
    """Samples for the rows of one rank. Without `state` it takes what rank 0 sampled."""

    def __init__(
        self,
        device: DeviceBackend,
        kernels: KernelTable,
        model: CausalLM,
        slots: Slots,
        columns: SamplingColumns,
        state: SamplingState | None,
        communicator: Communicator | None,
    ) -> None:
        self._device, self._xp, self._model, self._slots = device, device.xp, model, slots
        self._columns, self._state, self._communicator = columns, state, communicator
        self._mark = kernels["mark_broken"]
        self._plan: SamplingPlan | None = None
        self._made_of: tuple[Any, Any] = (None, None)  # arrays that stay while the rows do

    def plan(self, rows: StepRows) -> SamplingPlan:
        """What the rows need; kept while they stay as they are."""
        plan, version, made_of = self._plan, self._columns.version, self._made_of
        where = rows.positions()
        is_same = made_of[0] is rows.slots and made_of[1] is where
        if plan is not None and plan.version == version and is_same:
            return plan
        self._made_of = (rows.slots, where)
        slots = rows.slots if rows.is_decode and rows.width == 1 else rows.slots[where.rows]
        if plan is None or not plan.matches(self._columns, slots):
            plan = self._plan = SamplingPlan(self._columns, slots, self._device)
        return plan

    def sample(
        self,
        logits: Tensor,
        rows: StepRows,
        plan: SamplingPlan,
        read_before: Callable[[], None],
        fed: np.ndarray | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Sampling, Tensor]:
        """One token per row of logits, and [R] int64 marked tokens (kernel mark_broken).
        read_before brings the tokens of earlier steps to the host. fed: [B] drafts of each row that
        the host knows; None: no row has any that matters. positions: where the tokens will stand,
        if only the device knows."""
        sampling, xp = Sampling(plan), self._xp
        if self._state is None:
            marked = xp.zeros((plan.num_rows,), dtype=xp.int64, device=self._device.device)
        else:
            marked = self._lead(sampling, logits, rows, read_before, fed, positions)
        return sampling, self._agreed(sampling, marked)

    def _agreed(self, sampling: Sampling, marked: Tensor) -> Tensor:
        """Rank 0's marked tokens, on every rank: what is broken ends a row of drafts on all."""
        if self._communicator is not None:
            marked = self._communicator.broadcast(marked, 0)
            sampling.token_ids = marked * (marked >= 0).to(marked.dtype)
        elif sampling.token_ids is None:
            sampling.token_ids = marked
        return marked

    def sample_padded(self, logits: Tensor, plan: SamplingPlan) -> tuple[Sampling, Tensor, Tensor]:
        """The likeliest token of every row of a padded step, the same on every rank; and where each
        goes: those after the plan's rows to the last slot."""
        sampling, xp = Sampling(plan), self._xp
        marked = xp.zeros((logits.shape[0],), dtype=xp.int64, device=self._device.device)
        if self._state is not None:
            sampled = self._state.sampler.greedy(logits)
            marked = self._mark(sampled.token_ids, sampled.peak.reshape([-1]), None)
            sampling.token_ids = sampled.token_ids
        marked = self._agreed(sampling, marked)
        slots = np.full(logits.shape[0], self._slots.max_num_seqs, dtype=np.int64)
        slots[: plan.num_rows] = plan.slots
        return sampling, marked, self._device.to_device(slots)

    def _lead(
        self,
        sampling: Sampling,
        logits: Tensor,
        rows: StepRows,
        read_before: Callable[[], None],
        fed: np.ndarray | None,
        positions: Tensor | None,
    ) -> Tensor:
        state, slots, plan = self._state, self._slots, sampling.plan
        assert state is not None
        if plan.is_plain:
            sampled = state.sampler.greedy(logits)
        else:
            if plan.flags & bits.HOST:
                read_before()
            stand = rows.sample_positions()
            num_output = stand - slots.num_prompt[plan.slots]
            where = stand if positions is None else positions
            step = SamplingStep(where, num_output, slots.output_tokens)
            if fed is not None and fed.any():
                step.drafts = self._drafts_after(rows, plan, fed)
                step.drafts_dev = self._device.to_device(step.drafts)
            sampled = state.sampler.sample(logits, plan, step)
        sampling.token_ids, sampling.logprobs = sampled.token_ids, sampled.logprobs
        sampling.errors = sampled.errors
        marked = self._mark(sampled.token_ids, sampled.peak.reshape([-1]), sampled.possible)
        if sampled.errors:
            where = self._device.to_device(np.array(sorted(sampled.errors), dtype=np.int64))
            codes = self._xp.zeros_like(where) + FOUND_BEFORE
            marked = marked.clone() if marked is sampled.token_ids else marked
            self._xp.index_copy_(marked, 0, where, codes)
        return marked

    def _drafts_after(self, rows: StepRows, plan: SamplingPlan, fed: np.ndarray) -> np.ndarray:
        """[R] the draft that each sampled token is compared with, NO_DRAFT: none."""
        tokens = self._slots.token_ids
        where = np.minimum(rows.sample_positions(), tokens.shape[1] - 1)
        has_draft = plan.depths < fed[rows.positions().rows]
        return np.where(has_draft, tokens[plan.slots, where].astype(np.int64), NO_DRAFT)

    def count_kept(self, sampling: Sampling, kept: Tensor) -> None:
        """After drafts: remember for penalties which of the sampled tokens have come to stay."""
        if self._state is not None and sampling.plan.flags & bits.PENALTY:
            self._state.sampler.count(sampling.plan, sampling.token_ids, kept)

    def wants_prompt_logprobs(self, rows: StepRows) -> np.ndarray:
        """Which rows do of this step, alike on every rank. Their hidden states are all read."""
        if rows.is_decode:
            return np.zeros(0, dtype=np.int64)
        wanted = np.flatnonzero(self._columns.flags[rows.slots] & bits.PROMPT_LOGPROBS)
        is_early = rows.starts[wanted] < self._slots.num_prompt[rows.slots[wanted]] - 1
        early: np.ndarray = wanted[is_early]
        return early

    def prompt_logprobs(
        self, hidden: Tensor, rows: StepRows, wanted: np.ndarray
    ) -> list[tuple[int, LogprobTensors]]:
        """For the wanted rows: every prompt token that this chunk predicts, by batch row.
        hidden: [T, hidden]."""
        found: list[tuple[int, LogprobTensors]] = []
        first = rows.first_tokens()
        for row in wanted.tolist():
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            end = min(int(rows.seq_lens[row]), int(self._slots.num_prompt[slot]) - 1)
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
        targets = self._slots.token_ids[slot, begin + 1 : stop + 1].astype(np.int64)
        count = int(self._columns.num_prompt_logprobs[slot])
        return gather(
            self._device,
            values,
            self._device.to_device(targets),
            np.arange(stop - begin),
            np.full(stop - begin, count),
        )


def can_capture_sampling(device: DeviceBackend, kernels: KernelTable) -> bool:
    """Whether sampling at random can be captured. The reference's asks the host how many tokens are
    left, which cannot be captured where the host does not know it: reading a device's own memory
    waits for it, which ends a capture."""
    if device.limits.shares_host_memory and not device.limits.asynchronous:
        return True
    own = kernels["sample"], kernels["filter_logits"]
    return ops_sampling.sample not in own and ops_sampling.filter_logits not in own
