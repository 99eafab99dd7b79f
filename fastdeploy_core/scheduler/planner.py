"""Chooses what runs in one step, within a token budget and the pool's blocks.

Running sequences come first (decodes, then prompts begun earlier), then waiting ones are admitted
(admission.py). Without room the most junior running sequence that is not in the step yet is
preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress

import numpy as np

from fastdeploy_core.types import ModelRunnerOutput, RequestStatus

from .admission import Admission
from .counters import Counters
from .decode_count import DecodeCount
from .draft_policy import DraftPolicy
from .roster import Roster
from .sequence import Sequence
from .settings import SchedulerSettings
from .step import ScheduledStep, StepBuilder

# Blocks that a sequence gets for later steps where many hold nothing.
BLOCKS_AHEAD = 3


class StepPlanner:
    """Plans one step after the other over a roster."""

    def __init__(
        self,
        roster: Roster,
        settings: SchedulerSettings,
        counters: Counters,
        on_stuck: Callable[[Sequence], None],
        policy: DraftPolicy | None = None,
    ) -> None:
        self._policy = policy  # None: without speculation
        self._roster = roster
        self._kv = roster.kv
        self._settings = settings
        self._on_stuck = on_stuck  # called with a sequence that cannot get the blocks it needs
        self._count = DecodeCount(
            settings.max_decodes, settings.decodes_before_several, on_host=settings.on_host
        )
        self._repeats = True  # whether a step without drafts may be one of several decodes
        self._lookahead = 0
        self._free: np.ndarray | None = None  # places of sequences that all go ahead
        # Running places and number of waiting sequences, and what drafts are chosen by for these.
        self._chosen_for: tuple[np.ndarray | None, int] = (None, 0)
        self._num_rows = self._kind = 0
        self._prefills_first = True
        self._keeps_back = False  # prompts have let drafts go before
        self._step = StepBuilder(roster.columns, settings.max_num_batched_tokens)
        self._admission = Admission(roster, settings, counters, self._step, on_stuck)

    def plan(self) -> ScheduledStep | None:
        """The next step, or None if nothing can run before a step in flight has finished."""
        step = self._step
        step.begin()
        num_drafts = 0
        is_ahead = False
        if self._policy is not None:
            is_ahead = self._roster.awaited_step >= 0
            num_drafts = self._choose(self._policy)
        drafts_follow = num_drafts > 0
        # Also while numbers of drafts are compared, or none would seem slower than it is.
        self._repeats = not drafts_follow
        self._lookahead = self._settings.lookahead_tokens if drafts_follow else 0
        if is_ahead:
            self._plan_ahead(num_drafts)
            if step.is_empty and self._settings.max_rows_ahead and not self._roster.num_suspects:
                self._plan_prompts_ahead()
        elif self._roster.num_suspects:
            self._plan_suspect()
        elif self._settings.mixed_batches:
            self._plan_decodes()
            if not self._keeps_prompts_back():
                self._plan_prefills()
        else:
            first, second = self._plan_prefills, self._plan_decodes
            if not self._prefills_first:
                first, second = second, first
            first()
            if step.is_empty:
                second()
            self._prefills_first = not step.num_prefills
        if step.is_empty:
            return None
        if step.num_prefills and self._settings.max_rows_ahead:
            # Prompts are computed by steps that are not recorded, where drafting would cost more than
            # a draft saves, and the next step would have to wait for the drafts.
            num_drafts = 0
        planned = step.finish(
            self._roster.take_forgotten(),
            self._kv.take_copies(),
            num_drafts,
            fills=drafts_follow,
        )
        if planned.is_awaited:
            self._roster.awaited_step = planned.output.step_id
        return planned

    def note(self, step: ScheduledStep, output: ModelRunnerOutput) -> None:
        """A step was done."""
        self._count.note(step.num_decodes * step.is_decode, output.execute_s)

    def _choose(self, policy: DraftPolicy) -> int:
        """Drafts to ask for. Batches are told apart by the rows that the step, or the next one, will have,
        and by the kind of sampling (sequence.py)."""
        roster = self._roster
        places, num_waiting = roster.running_places(), roster.num_waiting
        if places is not self._chosen_for[0] or num_waiting != self._chosen_for[1]:
            self._chosen_for = (places, num_waiting)
            self._num_rows = max(1, min(self._settings.max_num_seqs, places.size + num_waiting))
            self._kind = int(roster.columns.kind[places].max(initial=0))
        return policy.choose(self._num_rows, self._kind)

    def _plan_ahead(self, num_drafts: int) -> None:
        """Have the rows of the step before go on before it is known how many of its drafts are right:
        the device knows. Otherwise the whole batch waits for that step: what could run meanwhile would
        only take the device from it."""
        roster, step, settings = self._roster, self._step, self._settings
        columns, places, asked = roster.columns, roster.running_places(), step.asked
        if (
            not 0 < step.num_drawn <= settings.max_rows_ahead
            or roster.num_suspects
            or (roster.num_waiting and len(roster.running) < settings.max_num_seqs)
            or not (places is self._free or columns.goes_ahead[places].all())
        ):
            return
        self._free = places  # the array is another one as soon as other sequences run
        limit, seqs = columns.limit[places], roster.running
        # One token of the step before is certain; where that is the last one, nothing is left to do.
        is_due = columns.known[places] + columns.pending[places] < limit
        if np.count_nonzero(is_due) < places.size:
            places, seqs, limit = places[is_due], list(compress(seqs, is_due)), limit[is_due]
        if not seqs or np.count_nonzero(columns.step[places] != step.step_id):
            return
        if len(seqs) * (1 + asked) > step.budget:
            return
        # One number of drafts throughout.
        several = self._num_decodes(places, 1 + asked) if asked == num_drafts else 1
        for number in sorted({several, 1}, reverse=True):
            end = columns.computed[places] + (number * (1 + asked) + self._lookahead)
            if self._grow_all(seqs, places, np.minimum(end, limit)):
                step.put_ahead(seqs, places, asked, number)
                return

    def _plan_prompts_ahead(self) -> None:
        """Rows that wait for their results are in nobody's way: prompts go in between, where they take
        nothing from anybody."""
        self._keeps_back = False
        for seq in self._roster.prefilling():
            if not self._continue_prefill(seq, self._try_grow):
                return
        self._admission.admit()

    def _keeps_prompts_back(self) -> bool:
        """Whether prompts wait for the next step, because this one is recorded with drafts and without
        prompts only."""
        return self._keeps_back and self._step.has_drafts

    def _has_prompts(self) -> bool:
        """Whether prompts are to be computed, and not all of them wait for somebody's end."""
        roster = self._roster
        has_place = len(roster.running) < self._settings.max_num_seqs
        return bool(roster.num_waiting and has_place) or bool(roster.prefilling())

    def _grow_all(self, seqs: list[Sequence], places: np.ndarray, wanted: np.ndarray) -> bool:
        """Blocks for so many tokens of each sequence, 0: it gets none; none at all if there are too few for all.
        Telling the device of a block takes the host longer than a step: where many hold nothing,
        not even a cached prefix, all sequences get some for later steps, too."""
        kv, columns = self._kv, self._roster.columns
        room, pool = columns.room[places], kv.pool
        num_free, num_empty = pool.num_available, pool.num_available - pool.num_cached
        if not np.count_nonzero(wanted > room):
            return True
        later = np.minimum(wanted + BLOCKS_AHEAD * kv.block_size, columns.limit[places])
        later[wanted == 0] = 0  # not in this step
        for ends, most in ((np.maximum(wanted, later), num_empty // 2), (wanted, num_free)):
            short = np.flatnonzero(ends > room).tolist()
            grown = [(seqs[row], int(ends[row])) for row in short]
            if sum(kv.num_blocks_for(end) - len(seq.table.blocks) for seq, end in grown) <= most:
                return all(self._try_grow(seq, end) for seq, end in grown)
        return False

    def _plan_decodes(self) -> None:
        columns, places = self._roster.columns, self._roster.running_places()
        if not places.size:
            return
        seqs = self._roster.running.copy()
        computed = columns.computed[places]
        known = columns.known[places] + columns.pending[places]
        # What has all its tokens known or on their way has nothing left to be fed.
        is_due = (computed >= columns.at_start[places]) & (known < columns.limit[places])
        needs_blocks = is_due & (computed >= columns.room[places])
        wanted = np.where(is_due, computed + 1, 0)
        if np.count_nonzero(needs_blocks) and not self._grow_all(seqs, places, wanted):
            for row in np.flatnonzero(needs_blocks).tolist():
                seq = seqs[row]
                is_due[row] = seq.status is RequestStatus.RUNNING and self._grow(
                    seq, seq.num_computed + 1, may_yield=True
                )
            # Juniors may have been preempted for seniors.
            is_due &= np.array([seq.status is RequestStatus.RUNNING for seq in seqs])
        drafts = None
        if columns.has_drafts or self._lookahead:
            drafts = self._plan_drafts(seqs, places, is_due)
        num_decodes = 1
        if drafts is None and self._repeats and np.count_nonzero(is_due) == places.size:
            num_decodes = self._plan_several(seqs, places)
        if np.count_nonzero(is_due) < places.size:
            places, seqs = places[is_due], list(compress(seqs, is_due))
            drafts = None if drafts is None else drafts[is_due]
        if seqs:
            self._step.put_decodes(seqs, places, drafts, num_decodes)

    def _plan_several(self, seqs: list[Sequence], places: np.ndarray) -> int:
        """How many times all running sequences decode in this step, with blocks for what that makes."""
        number = self._num_decodes(places, 1)
        end = self._roster.columns.computed[places] + number
        return number if number > 1 and self._grow_all(seqs, places, end) else 1

    def _num_decodes(self, places: np.ndarray, num_tokens: int) -> int:
        """How many times rows may decode in a step, if each time they may get so many tokens."""
        columns = self._roster.columns
        if self._count.most == 1 or self._has_prompts() or not columns.goes_ahead[places].all():
            return 1
        left = int((columns.limit[places] - columns.computed[places]).min()) - 1
        return self._count.choose(left // num_tokens)

    def _plan_drafts(
        self, seqs: list[Sequence], places: np.ndarray, is_due: np.ndarray
    ) -> np.ndarray:
        """How many drafts each row is fed. Every due row keeps a token of the budget; drafts get the
        rest, and blocks if some are free."""
        columns = self._roster.columns
        drafts: np.ndarray = columns.num_drafts[places]
        columns.has_drafts = bool(drafts.any())
        # A step with prompts is recorded where decode steps are, but only without drafts: they take turns.
        if self._settings.records_drafts and self._has_prompts():
            self._keeps_back = not self._keeps_back and columns.has_drafts
            if not self._keeps_back:
                drafts, self._step.asked = np.zeros_like(drafts), 0
        drafts = np.where(is_due, drafts, 0)
        computed, limit = columns.computed[places], columns.limit[places]
        drafts = np.minimum(drafts, np.maximum(limit - columns.known[places] - 1, 0))
        left = self._step.budget - int(is_due.sum())
        drafts = np.clip(left - (np.cumsum(drafts) - drafts), 0, drafts)
        wanted = computed + 1 + drafts
        if self._lookahead:  # for the drafter's own entries; it does without, too
            wanted = np.minimum(wanted + self._lookahead, limit)
        for row in np.flatnonzero(is_due & (wanted > columns.room[places])).tolist():
            seq, end = seqs[row], int(computed[row] + 1 + drafts[row])
            if not self._try_grow(seq, int(wanted[row])) and not self._try_grow(seq, end):
                drafts[row] = 0
        return drafts

    def _plan_prefills(self) -> None:
        for seq in self._roster.prefilling():
            if seq.status is RequestStatus.RUNNING:
                self._continue_prefill(seq, self._grow)
        if not self._step.is_stalled:
            self._admission.admit()

    def _plan_suspect(self) -> None:
        """After a failed step its sequences run one by one, so that the guilty one shows."""
        roster = self._roster
        seq = next((s for s in roster.running if s.is_suspect), None)
        if seq is not None:
            self._plan_alone(seq)
            return
        if roster.num_leaving:
            return
        for other in roster.running.copy():
            roster.preempt(other)
        seq = next((s for s in roster.returning if s.is_suspect), None)
        if seq is not None and not roster.num_leaving:
            self._admission.try_start(seq)

    def _plan_alone(self, seq: Sequence) -> None:
        if seq.num_in_flight:
            return
        if seq.is_prefill:
            self._continue_prefill(seq, self._grow)
        elif len(seq.token_ids) < seq.max_total_tokens and self._grow(
            seq, seq.num_computed + 1, may_yield=True
        ):
            self._step.put(seq, 1)

    def _continue_prefill(self, seq: Sequence, grow: Callable[[Sequence, int], bool]) -> bool:
        """False if it got no room."""
        chunk = self._admission.chunk(seq.num_known_at_start - seq.num_computed)
        if chunk < 1 or not self._admission.has_prefill_slot():
            return True
        has_room = grow(seq, seq.num_computed + chunk)
        if has_room:
            self._step.put(seq, chunk)
        return has_room

    def _grow(self, seq: Sequence, num_tokens: int, *, may_yield: bool = False) -> bool:
        """Blocks so that num_tokens fit, preempting juniors; False if the sequence has to wait."""
        while (blocks := self._kv.grow(seq.table, num_tokens)) is None:
            if not self._make_room(seq, may_yield):
                return False
        self._note_blocks(seq, blocks)
        return True

    def _try_grow(self, seq: Sequence, num_tokens: int) -> bool:
        """The same if some are free; nobody is preempted for it."""
        blocks = self._kv.grow(seq.table, num_tokens)
        if blocks is not None:
            self._note_blocks(seq, blocks)
        return blocks is not None

    def _note_blocks(self, seq: Sequence, blocks: list[int]) -> None:
        if blocks:
            seq.room = len(seq.table.blocks) * self._kv.block_size
            self._step.add_blocks(seq, blocks)

    def _make_room(self, seq: Sequence, may_yield: bool) -> bool:
        """Free some blocks; False if none come free before the next step."""
        roster = self._roster
        self._step.is_stalled = True
        if roster.num_leaving:
            return False
        if roster.drop_fork_sources():
            return True
        victim = next((s for s in reversed(roster.running) if not self._step.holds(s)), seq)
        if victim is not seq:
            roster.preempt(victim)
            return not victim.num_in_flight
        if len(roster.running) == 1 and not seq.num_in_flight:
            self._on_stuck(seq)
        elif may_yield and len(roster.running) > 1:
            roster.preempt(seq)
        return False
