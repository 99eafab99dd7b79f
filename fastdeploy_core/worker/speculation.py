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
from .step_buffers import DraftsWithResults

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastdeploy_core.config import SpeculativeConfig
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.tensor import Tensor

    from .device_slots import DeviceSlots
    from .drafters import Drafters
    from .input_batch import InputBatch
    from .pending import Launched
    from .prompt_graphs import RecordedPrompt
    from .recorded_draws import RecordedDraws
    from .recorded_step import RecordedStep
    from .sequence_state import SequenceState

logger = logging.getLogger(__name__)


class Speculation:
    """Owns the drafter of one rank (none where another rank drafts) and how its proposals fare."""

    def __init__(
        self,
        device: DeviceBackend,
        loaded: LoadedModel,
        batch: InputBatch,
        draws: RecordedDraws,
        columns: SamplingColumns,
        state: SequenceState | None,
        communicator: Communicator | None,
        drafters: Drafters,
        kernels: KernelTable,
        config: SpeculativeConfig,
    ) -> None:
        self._config = config
        self._greedy = kernels["greedy"]
        self._draws = draws
        self._device, self._xp, self._batch, self._columns = device, device.xp, batch, columns
        self._state, self._communicator = state, communicator
        self._drafter, self._follower = drafters.drafter, drafters.follower
        self._batches = DraftBatches(device, kernels, loaded, batch, drafters.first_layer)
        self.on_device = drafters.on_device
        # Such a drafter draws nothing, so one recording serves every kind of sampling.
        self.reads_history = bool(getattr(drafters.drafter, "reads_history", False))
        # Whether it goes on from what the target computed of every token, not of sampled ones alone.
        self.reads_hidden = drafters.on_device and not self.reads_history
        # Whether its drafts can stay on the device: no host drafter has a say in them.
        self.leaves_drafts = drafters.on_device and not drafters.is_continued
        self._is_kept = False  # whether recorded steps keep drafts where they are made
        self._draw_plan: SamplingPlan | None = None
        self.num_failures = 0  # proposals lost to an exception or to nonsense

    def recorded_numbers(self) -> tuple[int, ...]:
        """Numbers of drafts that a drafter on the device is recorded for."""
        if not self.on_device:
            return ()
        most = self._config.num_speculative_tokens
        return tuple(sorted({1, most})) if self._config.adaptive_length else (most,)

    # -- drafting on the device -------------------------------------------------------------------

    def propose(
        self, launched: Launched, recorded: RecordedStep | None, slots: DeviceSlots | None
    ) -> Tensor | DraftsWithResults | None:
        """[B, max_drafts] drafts behind a launched step; None: none are made here. Every rank comes
        here alike."""
        drafts = self._make(launched, recorded, slots)
        self._is_kept = slots is not None and self.leaves_drafts
        if slots is not None and self.leaves_drafts:
            # A step goes ahead of one that makes or judges drafts, and of no other.
            is_awaited = launched.max_drafts > 0 or launched.accepted is not None
            if recorded is None and launched.drawn is not None and is_awaited:
                assert not isinstance(drafts, DraftsWithResults), "only recorded steps make these"
                drafts = self._leave(launched, drafts, slots)
            if drafts is not None:
                slots.holds_drafts(launched.rows)
        return drafts

    def _leave(
        self, launched: Launched, drafts: Tensor | None, slots: DeviceSlots
    ) -> Tensor | None:
        """Behind a step that is not recorded: have the device hold what a step needs that goes ahead of
        its results. What was taken of the drafts."""
        rows, limit = launched.rows, max(0, launched.max_drafts)
        slots.follow(rows, launched.accepted, limit)
        if not limit:
            return drafts
        if drafts is None:
            drafts = self._nothing(rows.slots.size, limit)
        no_results = self._xp.zeros(
            (rows.slots.size, 0), dtype=self._xp.int64, device=drafts.device
        )
        where = self._device.to_device(rows.slots)
        return slots.keep_drafts(where, drafts, no_results, posts=False)

    def draw_and_draft(
        self, launched: Launched, recorded: RecordedStep
    ) -> DraftsWithResults | None:
        """Queue the greedy tokens of a recorded step and the drafts behind them; None, and nothing is queued,
        where no drafts belong to the step."""
        if launched.concerns_drafters and self._drafts_behind(launched):
            launched.together = recorded.replay_greedy_and_draft(launched.max_drafts)
        return launched.together

    def _drafts_behind(self, launched: Launched) -> bool:
        """Whether a drafter on the device has something to do behind the step."""
        return self.on_device and launched.max_drafts >= int(self.reads_history)

    def _make(
        self, launched: Launched, recorded: RecordedStep | None, slots: DeviceSlots | None
    ) -> Tensor | DraftsWithResults | None:
        drafter, step, max_drafts = self._drafter, launched.target, launched.max_drafts
        launched.target = None
        if launched.together is not None or drafter is None or not self._drafts_behind(launched):
            return launched.together
        began = time.perf_counter()
        drafts: Tensor | DraftsWithResults | None = None
        if recorded is not None:
            if not self.reads_history:
                self._draws.fill(launched.rows.slots)
            drafts = recorded.replay_drafts(max_drafts)
        elif step is not None and step.recorded is not None:
            # Drafts, which are not recorded behind prompts, would cost more than they save.
            rows, batches = launched.rows, self._batches
            next_ids = batches.next_ids(rows, step, launched.drawn)
            step.recorded.fill(next_ids, batches.last(rows, launched.accepted))
        elif step is not None:
            drafts = self._propose(drafter, launched, step, max_drafts, slots)
        launched.draft_s = time.perf_counter() - began
        return drafts

    @property
    def recorded_fill(self) -> Callable[[RecordedPrompt], None] | None:
        """What is recorded behind prompts: a drafter on the device with layers of its own fills their
        cache. None: there is no such drafter."""
        drafter = self._drafter
        if drafter is None or not self.reads_hidden:
            return None

        def fill(recorded: RecordedPrompt) -> None:
            batch = self._batches.make_prompt(recorded, lambda logits, step: self._greedy(logits))
            drafter.propose(batch)

        return fill

    def propose_recorded(
        self, slots: DeviceSlots, recorded: RecordedStep, max_drafts: int, is_random: bool
    ) -> Tensor:
        """What is recorded behind a step: [rows, max_drafts]."""
        assert self._drafter is not None

        def draw(logits: Tensor, step: int) -> Tensor:
            if is_random:
                last = self._xp.index_select(batch.attention.positions, 0, batch.last)
                ids, _ = self._draws.draw(logits, last + (1 + step))
            else:
                ids = self._greedy(logits)
            return ids if self._communicator is None else self._communicator.broadcast(ids, 0)

        batch = self._batches.make_recorded(
            recorded, slots, max_drafts, draw, is_greedy=not is_random
        )
        return self._checked(self._drafter.propose(batch), recorded.size, max_drafts)

    def _propose(
        self,
        drafter: Drafter,
        launched: Launched,
        step: TargetStep,
        max_drafts: int,
        slots: DeviceSlots | None,
    ) -> Tensor | None:
        rows = launched.rows
        draw = _Draw(self, self._plan(rows.slots))
        batch = self._batches.make(rows, step, launched.drawn, launched.accepted, max_drafts, draw)
        draw.positions = self._xp.index_select(batch.attention.positions, 0, batch.last)
        if slots is not None and slots.history is not None:
            batch.history, batch.history_rows = slots.history, self._device.to_device(rows.slots)
            batch.num_known = draw.positions + 2
        try:
            drafts = drafter.propose(batch)
            return self._checked(drafts, rows.slots.size, max_drafts) if max_drafts else None
        except Exception as error:
            if self._device.is_lost(error):
                raise
            self._count_failure(drafter, error)
            return None

    def _nothing(self, num_rows: int, max_drafts: int) -> Tensor:
        """In place of drafts that could not be made."""
        xp = self._xp
        shape = [num_rows, max_drafts]
        return xp.full(shape, NO_DRAFT, dtype=xp.int64, device=self._device.device)

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
        rows, limit, batch = launched.rows, launched.max_drafts, self._batch
        if self._drafter is None:
            return None
        self._observe(launched)
        if limit <= 0:
            return None
        if from_device is not None and self._is_kept:
            return self._as_kept(launched, from_device)
        slots = rows.slots
        goes_on = rows.samples & (batch.owner[slots] == launched.owners)
        if launched.errors:
            goes_on[list(launched.errors)] = False
        room = np.where(goes_on, batch.max_model_len - 1 - batch.num_known[slots], 0)
        limits = np.clip(room, 0, limit)
        table = np.full((slots.size, limit), NO_DRAFT, dtype=np.int64)
        if from_device is not None:
            table[:] = self._valid_rows(self._drafter, from_device, limits)
        elif not self.on_device:
            self._ask(self._drafter, table, slots, limits)
        if self._follower is not None:
            self._ask(self._follower, table, slots, limits)
        if self._state is not None:
            self._state.cut_forbidden(slots, table)
        return table if (table[:, :1] != NO_DRAFT).any() else None

    def _as_kept(self, launched: Launched, drafts: np.ndarray) -> np.ndarray | None:
        """Drafts that the device keeps, which has taken only what fits: for steps that go by what the host
        says, as those of grammars do."""
        self.check_kept(drafts)
        table: np.ndarray = np.maximum(drafts, NO_DRAFT)  # a copy: the memory is lent
        if self._state is not None:
            self._state.cut_forbidden(launched.rows.slots, table)
        return table

    def check_kept(self, drafts: np.ndarray) -> None:
        """Count it if the device has found something among a drafter's proposals that is no token."""
        if np.count_nonzero(drafts < NO_DRAFT) and self._drafter is not None:
            self._count_failure(self._drafter, self._no_token(int(drafts.min())))

    def _valid_rows(self, drafter: Drafter, drafts: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """Each row up to its limit and to the first that is no draft; what is no token of the
        vocabulary counts as a failure."""
        is_token = (drafts >= 0) & (drafts < self._columns.vocab_size)
        if not (is_token | (drafts == NO_DRAFT)).all():
            wrong = drafts[~is_token & (drafts != NO_DRAFT)][0]
            self._count_failure(drafter, self._no_token(int(wrong)))
        nth = np.arange(drafts.shape[1])
        kept = (np.cumsum(~is_token, 1) == 0) & (nth < limits[:, None])
        return np.where(kept, drafts, NO_DRAFT)

    def forget(self, seq_id: int) -> None:
        """The sequence left."""
        for drafter in (self._drafter, self._follower):
            if drafter is not None:
                try:
                    drafter.forget(seq_id)
                except Exception as error:
                    self._count_failure(drafter, error)

    def _ask(
        self, drafter: Drafter, table: np.ndarray, slots: np.ndarray, limits: np.ndarray
    ) -> None:
        """Have a host drafter continue the rows of the table that have room."""
        batch, before = self._batch, (table != NO_DRAFT).sum(1)
        wanting = np.flatnonzero(before < limits)
        if not wanting.size:
            return
        tokens, known = batch.token_ids, batch.num_known[slots[wanting]].tolist()
        begins = before[wanting].tolist()
        most = (limits - before)[wanting].tolist()
        question = HostDraftInput(
            seq_ids=batch.seq_ids[slots[wanting]].tolist(),
            token_ids=[
                tokens[slot, :n] for slot, n in zip(slots[wanting].tolist(), known, strict=True)
            ],
            max_drafts=most,
            drafts=[
                table[row, :n].tolist() if n else []
                for row, n in zip(wanting.tolist(), begins, strict=True)
            ],
        )
        try:
            proposals = drafter.propose(question)
            if len(proposals) != wanting.size:
                raise ValueError(f"propose() answered {len(proposals)} of {wanting.size} rows")
            for row, begin, limit, proposal in zip(
                wanting.tolist(), begins, most, proposals, strict=True
            ):
                if not proposal:
                    continue
                if len(proposal) > limit:
                    raise ValueError(f"propose() made {len(proposal)} drafts of at most {limit}")
                valid = self._valid(drafter, proposal)
                table[row, begin : begin + len(valid)] = valid
        except Exception as error:
            self._count_failure(drafter, error)

    def _valid(self, drafter: Drafter, proposal: list[int]) -> list[int]:
        """The same for one row of a host drafter."""
        size = self._columns.vocab_size
        if min(proposal) >= 0 and max(proposal) < size:
            return proposal
        wrong = next(n for n, token in enumerate(proposal) if not 0 <= token < size)
        if proposal[wrong] != NO_DRAFT:
            self._count_failure(drafter, self._no_token(proposal[wrong]))
        return proposal[:wrong]

    def _no_token(self, token: int) -> ValueError:
        return ValueError(
            f"propose() returned token {token} of a vocabulary of {self._columns.vocab_size}"
        )

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

    def _count_failure(self, drafter: Drafter, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            logger.warning(
                "speculative method %s failed; its drafts are lost, requests go on. Further failures "
                "are only counted (fastdeploy:spec_decode_drafter_failures_total)",
                drafter.name,
                exc_info=error,
            )


def recorded_widths(config: SpeculativeConfig | None) -> tuple[int, ...]:
    """Tokens per row that steps are recorded for; fewer drafts are padded."""
    if config is None:
        return (1,)
    most = config.num_speculative_tokens
    return tuple(sorted({1, 1 + most, 2 if config.adaptive_length and most > 2 else 1}))


class _Draw:
    """DraftBatch.draw of one step."""

    def __init__(self, speculation: Speculation, plan: SamplingPlan) -> None:
        self._speculation, self._plan = speculation, plan
        self.positions: Tensor = None  # [B]: of each row's last verified token

    def __call__(self, logits: Tensor, step: int) -> Tensor:
        """The token drawn now stands one behind the last verified one, the first draft two."""
        return self._speculation.draw(logits, self._plan, self.positions + (2 + step))
