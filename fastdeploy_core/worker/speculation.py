"""Drafting on one rank: has drafts made behind every step, and survives drafters.

A drafter that fails, or proposes nonsense, costs its drafts; requests do not notice.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.contracts.speculative import NO_DRAFT, Drafter, HostDraftInput
from fastdeploy_core.sampling.columns import SamplingColumns, SamplingPlan

from .draft_batch import DraftBatches, TargetStep

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

    from .device_slots import DeviceSlots
    from .drafters import Drafters
    from .input_batch import InputBatch
    from .loader import LoadedModel
    from .pending import Launched
    from .sequence_state import SequenceState
    from .step_graphs import RecordedStep

logger = logging.getLogger(__name__)


class Speculation:
    """Owns the drafter of one rank (none where another rank drafts) and how its proposals fare."""

    def __init__(
        self,
        device: DeviceBackend,
        loaded: LoadedModel,
        batch: InputBatch,
        columns: SamplingColumns,
        state: SequenceState | None,
        communicator: Communicator | None,
        drafters: Drafters,
        kernels: KernelTable,
    ) -> None:
        self._greedy = kernels["greedy"]
        self._device, self._xp, self._batch, self._columns = device, device.xp, batch, columns
        self._state, self._communicator = state, communicator
        self._drafter, self._follower = drafters.drafter, drafters.follower
        self._batches = DraftBatches(device, loaded, batch, drafters.first_layer)
        self.on_device = drafters.runs_on == "device"
        self._draw_plan: SamplingPlan | None = None
        self.num_failures = 0  # proposals lost to an exception or to nonsense

    # -- drafting on the device -------------------------------------------------------------------

    def propose(self, launched: Launched, recorded: RecordedStep | None) -> Tensor | None:
        """[B, max_drafts] drafts behind a launched step; None: none are made here. Every rank comes
        here alike."""
        drafter, step, max_drafts = self._drafter, launched.target, launched.max_drafts
        launched.target = None
        if drafter is None or not self.on_device or max_drafts < 0:
            return None
        began, num_rows = time.perf_counter(), launched.rows.slots.size
        drafts: Tensor | None = None
        if recorded is not None and launched.drawn is None:
            drafts = recorded.replay_proposal(max_drafts, num_rows)
        if recorded is not None and drafts is None:
            step = TargetStep.of_recorded(recorded, num_rows, self._batches)
            launched.accepted = recorded.accepted
            if launched.drawn is None:
                launched.drawn = recorded.drawn[: num_rows * recorded.width]
            if launched.accepted is not None:
                launched.accepted = launched.accepted[:num_rows]
        if drafts is None and step is not None:
            drafts = self._propose(drafter, launched, step, max_drafts)
        launched.draft_s = time.perf_counter() - began
        return drafts

    def propose_recorded(
        self, slots: DeviceSlots, recorded: RecordedStep, max_drafts: int
    ) -> Tensor:
        """What is recorded behind a step that draws greedily: [rows, max_drafts]."""
        assert self._drafter is not None

        def draw(logits: Tensor, step: int) -> Tensor:
            ids = self._greedy(logits)
            return ids if self._communicator is None else self._communicator.broadcast(ids, 0)

        batch = self._batches.make_recorded(recorded, slots, max_drafts, draw)
        return self._checked(self._drafter.propose(batch), recorded.size, max_drafts)

    def _propose(
        self, drafter: Drafter, launched: Launched, step: TargetStep, max_drafts: int
    ) -> Tensor | None:
        rows = launched.rows
        draw = _Draw(self, self._plan(rows.slots))
        batch = self._batches.make(rows, step, launched.drawn, launched.accepted, max_drafts, draw)
        draw.positions = self._xp.index_select(batch.attention.positions, 0, batch.last)
        try:
            drafts = drafter.propose(batch)
            return self._checked(drafts, rows.slots.size, max_drafts) if max_drafts else None
        except Exception as error:
            if self._device.is_lost(error):
                raise
            self._count_failure(drafter, error)
            return None

    def _plan(self, slots: np.ndarray) -> SamplingPlan:
        """How the rows draw; kept while they stay."""
        plan = self._draw_plan
        if plan is None or not plan.matches(self._columns, slots):
            plan = self._draw_plan = SamplingPlan(self._columns, slots, self._device)
        return plan

    def draw(self, logits: Tensor, plan: SamplingPlan, positions: Tensor) -> Tensor:
        """What the target would draw from these logits at these positions; the same on all ranks."""
        ids = positions
        if self._state is not None:
            ids = self._state.sampler.draw_at(logits, plan, positions)
        return ids if self._communicator is None else self._communicator.broadcast(ids, 0)

    def _checked(self, drafts: Any, num_rows: int, max_drafts: int) -> Tensor:
        """A drafter's answer, without what is no token."""
        xp = self._xp
        shape = tuple(int(size) for size in drafts.shape)
        if shape != (num_rows, max_drafts) or xp.dtype_name(drafts) != "int64":
            raise TypeError(
                f"propose() returned {xp.dtype_name(drafts)} {list(shape)}; expected int64 "
                f"{[num_rows, max_drafts]}"
            )
        return drafts

    # -- drafting on the host, once a step's tokens are there ---------------------------------------

    def collect(self, launched: Launched, from_device: np.ndarray | None) -> np.ndarray | None:
        """[B, k] drafts for the next step, NO_DRAFT behind each row's last one; None: there are none.
        Rank 0 only. `from_device`: what `propose` made, on the host."""
        rows, limit = launched.rows, launched.max_drafts
        if limit <= 0 or self._drafter is None:
            return None
        slots = rows.slots
        goes_on = rows.samples & (self._batch.owner[slots] == launched.owners)
        goes_on[list(launched.errors)] = False
        room = np.where(goes_on, self._batch.max_model_len - 1 - self._batch.num_known[slots], 0)
        limits = np.clip(room, 0, limit)
        wanting = np.flatnonzero(limits).tolist()
        self._observe(launched)
        drafts: dict[int, list[int]] = {}
        if from_device is not None:
            for row in wanting:
                proposal = self._valid(self._drafter, from_device[row].tolist())
                drafts[row] = proposal[: limits[row]]
        elif not self.on_device:
            drafts = self._ask(self._drafter, wanting, slots, limits, {})
        if self._follower is not None:
            short = [row for row in wanting if len(drafts.get(row, ())) < limits[row]]
            for row, more in self._ask(self._follower, short, slots, limits, drafts).items():
                drafts[row] = [*drafts.get(row, ()), *more]
        return self._table(drafts, slots, limit)

    def forget(self, seq_id: int) -> None:
        """The sequence left."""
        for drafter in (self._drafter, self._follower):
            if drafter is not None:
                try:
                    drafter.forget(seq_id)
                except Exception as error:
                    self._count_failure(drafter, error)

    def _ask(
        self,
        drafter: Drafter,
        wanting: list[int],
        slots: np.ndarray,
        limits: np.ndarray,
        before: dict[int, list[int]],
    ) -> dict[int, list[int]]:
        """A host drafter's proposals by row, behind the drafts that a row has `before`."""
        if not wanting:
            return {}
        batch = self._batch
        chosen = [int(slots[row]) for row in wanting]
        ahead = [before.get(row, []) for row in wanting]
        question = HostDraftInput(
            seq_ids=batch.seq_ids[chosen].tolist(),
            token_ids=[batch.token_ids[slot, : batch.num_known[slot]] for slot in chosen],
            max_drafts=[
                int(limits[row]) - len(some) for row, some in zip(wanting, ahead, strict=True)
            ],
            drafts=ahead,
        )
        try:
            proposals = drafter.propose(question)
            if len(proposals) != len(wanting):
                raise ValueError(f"propose() answered {len(proposals)} of {len(wanting)} rows")
            found = {}
            for row, proposal, most in zip(wanting, proposals, question.max_drafts, strict=True):
                tokens = self._valid(drafter, proposal)
                if len(proposal) > most:
                    raise ValueError(f"propose() made {len(proposal)} drafts of at most {most}")
                found[row] = tokens
            return found
        except Exception as error:
            self._count_failure(drafter, error)
            return {}

    def _valid(self, drafter: Drafter, proposal: list[int]) -> list[int]:
        """The drafts up to the first that is none; what is no token of the vocabulary counts as a
        failure."""
        size = self._columns.vocab_size
        for place, token in enumerate(proposal):
            if not 0 <= token < size:
                if token != NO_DRAFT:
                    what = f"propose() returned token {token} of a vocabulary of {size}"
                    self._count_failure(drafter, ValueError(what))
                return [int(t) for t in proposal[:place]]
        return [int(t) for t in proposal]

    def _observe(self, launched: Launched) -> None:
        """Tell a host drafter how its last proposals fared."""
        drafter, rows, accepted = self._drafter, launched.rows, launched.num_accepted
        if drafter is None or self.on_device or accepted is None or launched.draft_ids is None:
            return
        seq_ids, fed = self._batch.seq_ids[rows.slots], launched.fed_drafts()
        try:
            for row in np.flatnonzero(rows.num_drafts).tolist():
                drafter.observe(int(seq_ids[row]), fed[row], int(accepted[row]))
        except Exception as error:
            self._count_failure(drafter, error)

    def _table(
        self, drafts: dict[int, list[int]], slots: np.ndarray, width: int
    ) -> np.ndarray | None:
        """As columns; drafts that a row's grammar forbids are cut off."""
        table = np.full((slots.size, width), NO_DRAFT, dtype=np.int64)
        for row, tokens in drafts.items():
            if tokens and self._state is not None:
                tokens = tokens[: self._state.num_allowed(int(slots[row]), tokens)]
            table[row, : len(tokens)] = tokens
        return table if (table[:, :1] != NO_DRAFT).any() else None

    def _count_failure(self, drafter: Drafter, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            logger.warning(
                "speculative method %s failed; its drafts are lost, requests go on. Further failures "
                "are only counted (fastdeploy:spec_decode_drafter_failures_total)",
                drafter.name,
                exc_info=error,
            )


class _Draw:
    """DraftBatch.draw of one step."""

    def __init__(self, speculation: Speculation, plan: SamplingPlan) -> None:
        self._speculation, self._plan = speculation, plan
        self.positions: Tensor = None  # [B]: of each row's last verified token

    def __call__(self, logits: Tensor, step: int) -> Tensor:
        """The token drawn now stands one behind the last verified one, the first draft two."""
        return self._speculation.draw(logits, self._plan, self.positions + (2 + step))
