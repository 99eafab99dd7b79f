"""Chooses what runs in one step, within a token budget and the pool's blocks.

Running sequences come first (decodes, then prompts begun earlier), then waiting ones are admitted
(admission.py). Without room the most junior running sequence that is not in the step yet is
preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import compress

import numpy as np

from fastdeploy_core.types import ModelRunnerOutput, RequestStatus
from fastdeploy_core.types.engine import EngineStats

from .admission import Admission
from .decode_count import DecodeCount
from .draft_policy import DraftPolicy
from .roster import Roster
from .sequence import OTHER, Sequence
from .settings import NO_LIMIT, SchedulerSettings
from .step import ScheduledStep, StepBuilder

# Blocks that a sequence gets for later steps where many hold nothing.
BLOCKS_AHEAD = 3
# Decodes after prompts before steps that are queued ahead decode several times.
BEFORE_SEVERAL = 16


class StepPlanner:
    """Plans one step after the other over a roster."""

    def __init__(
        self,
        roster: Roster,
        settings: SchedulerSettings,
        counters: EngineStats,
        on_stuck: Callable[[Sequence], None],
        policy: DraftPolicy | None = None,
    ) -> None:
        self._policy = policy  # None: without speculation
        self._roster = roster
        self._kv = roster.kv
        self._on_stuck = on_stuck  # called with a sequence that cannot get the blocks it needs
        self._batch, self._device = settings.batch, settings.device
        after, on_host = BEFORE_SEVERAL if settings.batch.overlap else 0, settings.device.on_host
        self._count = DecodeCount(settings.device.max_decodes, after, on_host=on_host)
        self._most_lookahead = settings.lookahead_tokens
        self._num_drafts = self._lookahead = 0  # to be made after the step, and tokens beside them
        self._most_steps: Mapping[int, int] = {}
        # Set by the engine: how many tokens of prompts a step may hold, where prompts may be split,
        # and whether one that was split waits while there is anything else.
        self.most_prompt_tokens: Callable[[], tuple[int, bool]] | None = None
        # Likewise: whether to schedule a step of no rows where nothing can run.
        self.wants_empty: Callable[[], bool] = bool
        self._prefills_first = True
        self._keeps_back = self._may_feed = False  # prompts let this step pass; drafts exist
        self._passed = 0  # what prompts let pass last: 1: drafts being made, 2: drafts being fed
        self._step = StepBuilder(
            roster.columns, settings.batch.max_num_batched_tokens, settings.max_encode_tokens
        )
        self._admission = Admission(roster, settings, counters, self._step, on_stuck)

    def plan(self, most_steps: Mapping[int, int]) -> ScheduledStep | None:
        """The next step, or None if nothing can run before a step in flight has finished."""
        step, roster, self._most_steps = self._step, self._roster, most_steps
        step.begin()
        is_full = len(roster.running) >= self._batch.max_num_seqs
        if is_full and len(roster.arrived.active) > 1 and not roster.num_suspects:
            roster.yield_place()
        self._num_drafts = 0 if self._policy is None else self._choose(self._policy)
        self._lookahead = self._most_lookahead if self._num_drafts else 0
        self._may_feed = self._may_feed or self._num_drafts > 0
        if roster.num_suspects:
            self._plan_suspect()
        elif self._device.mixed_batches:
            self._keeps_back = False
            self._plan_decodes()
            if step.is_empty or not self._keeps_back:
                self._plan_prefills()
        else:
            plans = (self._plan_prefills, self._plan_decodes)
            for plan in plans if self._prefills_first else plans[::-1]:
                if step.is_empty:
                    plan()
            self._prefills_first = not step.num_prefills
        if (is_empty := step.is_empty) and not (self._kv.has_copies or self.wants_empty()):
            return None
        forgotten, roster.forgotten = roster.forgotten, []
        # Drafts after prompts may cost too much, and after copies alone there are none.
        is_costly = is_empty or (step.num_prefills and self._device.captures_drafting)
        return step.finish(
            forgotten,
            self._kv.take_copies(),
            0 if is_costly else self._num_drafts,
            fills=self._num_drafts > 0 and not is_empty,
        )

    def note(self, step: ScheduledStep, output: ModelRunnerOutput) -> None:
        """A step was done."""
        self._count.note(step.num_decodes * step.is_decode, output.execute_s)

    def _choose(self, policy: DraftPolicy) -> int:
        """Drafts to ask for, as many as the next step's budget can hold where it has to hold them
        all. Batches are told apart by the rows that the step, or the next one,
        will have, and by the kind of sampling (sequence.py)."""
        roster = self._roster
        num_seqs = roster.running_places().size + roster.num_waiting
        num_rows = max(1, min(self._batch.max_num_seqs, num_seqs))
        number = policy.choose(num_rows, roster.kind)
        if number and self._device.captures_drafting:  # all that is made is fed, or nothing of it
            number = max(0, min(number, self._batch.max_num_batched_tokens // num_rows - 1))
        return number

    def _has_prompts(self) -> bool:
        """Whether prompts are to be computed, and not all of them wait for somebody's end."""
        roster = self._roster
        has_place = len(roster.running) < self._batch.max_num_seqs
        return bool(roster.num_waiting and has_place) or bool(roster.prefilling())

    def _grow_all(self, seqs: list[Sequence], places: np.ndarray, wanted: np.ndarray) -> bool:
        """Blocks for so many tokens of each sequence; none at all if there are too few for all.
        Telling the device of a block takes the host longer than a step: where many hold nothing,
        not even a cached prefix, all sequences get some for later steps, too."""
        kv, columns = self._kv, self._roster.columns
        room = columns.room[places]
        if not np.count_nonzero(wanted > room):
            return True
        num_free, num_empty = kv.num_available, kv.num_empty
        later = np.minimum(wanted + BLOCKS_AHEAD * kv.block_size, columns.limit[places])
        for ends, most in ((np.maximum(wanted, later), num_empty // 2), (wanted, num_free)):
            short = np.flatnonzero(ends > room).tolist()
            grown = [(seqs[row], int(ends[row])) for row in short]
            if sum(kv.num_blocks_for(end) - len(seq.table.blocks) for seq, end in grown) <= most:
                return all(self._try_grow(seq, end) for seq, end in grown)
        return False

    def _plan_decodes(self) -> None:
        columns, places = self._roster.columns, self._roster.running_places()
        seqs = self._roster.running.copy()
        # Each step on its way gives a row one token at least; what has come to its limit with these
        # has nothing left to be fed.
        computed, limit = columns.computed[places], columns.limit[places]
        left = limit - (columns.known[places] + columns.pending[places])
        is_due = (computed >= columns.at_start[places]) & (left > 0)
        if seqs and (most := self._most_steps):  # by seq_id, steps that may be in flight
            is_due &= [s.num_in_flight < most.get(s.seq_id, NO_LIMIT) for s in seqs]
        num_due = np.count_nonzero(is_due)
        if not num_due:
            return
        is_every = num_due == places.size
        if not is_every:
            places, left, seqs = places[is_due], left[is_due], list(compress(seqs, is_due))
            computed, limit = computed[is_due], limit[is_due]
        drafts: np.ndarray | int = 0 if self._policy is None else self._drafts_to_feed(places, left)
        number = self._num_decodes(drafts, limit - computed) if is_every else 1
        if number > 1:
            ends = computed + (number * (1 + self._num_drafts) + self._lookahead)
            if self._grow_all(seqs, places, np.minimum(ends, limit)):
                self._step.put_decodes(seqs, places, drafts, number)
                return
        ends = np.minimum(computed + (1 + self._lookahead + drafts), limit)
        if not self._grow_all(seqs, places, ends):
            has_room = self._grow_each(seqs, places, ends, np.minimum(computed + 1, limit))
            places, seqs = places[has_room], list(compress(seqs, has_room))
            drafts = drafts[has_room] if isinstance(drafts, np.ndarray) else drafts
        if seqs:
            self._step.put_decodes(seqs, places, drafts)

    def _grow_each(
        self, seqs: list[Sequence], places: np.ndarray, wanted: np.ndarray, least: np.ndarray
    ) -> np.ndarray:
        """[seqs] bool: which of them run and have blocks for at least so many tokens, for which
        juniors are preempted."""
        has_room = np.ones(len(seqs), dtype=bool)
        for row in np.flatnonzero(wanted > self._roster.columns.room[places]).tolist():
            seq = seqs[row]
            if seq.status is RequestStatus.RUNNING and not self._try_grow(seq, int(wanted[row])):
                has_room[row] = self._grow(seq, int(least[row]), may_yield=True)
        # Juniors may have been preempted for seniors.
        has_room &= np.array([seq.status is RequestStatus.RUNNING for seq in seqs])
        return has_room

    def _drafts_to_feed(self, places: np.ndarray, left: np.ndarray) -> np.ndarray | int:
        """The most drafts that each of these rows is fed, one number if it is the same for all.
        Every row keeps a token of the budget; drafts get the rest. left: tokens up to a sequence's
        limit."""
        device, step = self._device, self._step
        if not self._may_feed:
            return 0
        drafts: np.ndarray = self._roster.columns.asked[places]
        has_any, makes_any = bool(np.count_nonzero(drafts)), self._num_drafts > 0
        self._may_feed = has_any or makes_any
        # A step with prompts is a captured graph only without drafts, and leaves none: they take
        # turns. Prompts let a step pass that makes drafts, one that is fed them, and then come.
        if device.captures_drafts and self._has_prompts():
            turn = 2 if has_any else int(makes_any and device.captures_drafting)
            self._keeps_back = self._passed < turn
            self._passed = turn if self._keeps_back else 0
            has_any = has_any and self._keeps_back
        if not has_any:
            return 0
        budget = step.budget - places.size
        if not device.captures_drafting:
            drafts = np.minimum(drafts, left - 1)
            drafts = np.clip(budget - (np.cumsum(drafts) - drafts), 0, drafts)
        is_even = np.count_nonzero(drafts == drafts[0]) == drafts.size
        if device.captures_drafting:  # a captured graph feeds all that the device holds
            total = int(drafts[0]) * drafts.size if is_even else int(drafts.sum())
            if total > budget:
                return 0
        return int(drafts[0]) if is_even else drafts

    def _num_decodes(self, drafts: np.ndarray | int, left: np.ndarray) -> int:
        """How many times all running sequences may decode in this step. left: tokens that may yet
        be computed of each."""
        count, num_drafts = self._count, self._num_drafts
        # Each decode is fed what the one before made.
        is_even = not isinstance(drafts, np.ndarray) and drafts == num_drafts
        if count.most == 1 or not is_even or self._roster.kind == OTHER or self._has_prompts():
            return 1
        number = count.choose((min(left.tolist()) - 1) // (1 + num_drafts))
        return min(number, self._device.max_drafted_decodes) if num_drafts else number

    def _plan_prefills(self) -> None:
        step, prompts = self._step, self._roster.prefilling()
        if not prompts and not self._roster.num_waiting:
            return
        ask = self.most_prompt_tokens if self._batch.enable_chunked_prefill else None
        most, waits = ask() if ask is not None else (step.budget, False)
        beyond = max(0, step.budget - most)
        step.budget -= beyond
        # Half is kept for the senior prompt; others, which are shorter, pass it with the rest.
        kept, last = 0, prompts[:0]
        is_shared = len(prompts) > 1 or self._roster.num_waiting
        if prompts and (is_shared or waits) and self._device.max_prefills_per_step is None:
            kept, last = (step.budget + 1) // 2, prompts[:1]
            kept = min(kept, last[0].num_known_at_start - last[0].num_computed)
            prompts = prompts[:0:-1]
        step.budget -= kept
        for seq in prompts:
            self._continue_prefill(seq)
        if not step.is_stalled:
            self._admission.admit(holds_long=waits)
        step.budget += kept
        for seq in last:
            if step.is_empty or not waits:
                self._continue_prefill(seq)
        if waits and step.is_empty and not step.is_stalled:
            self._admission.admit()
        step.budget += beyond

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
            self._continue_prefill(seq)
        elif len(seq.token_ids) < seq.max_total_tokens and self._grow(
            seq, seq.num_computed + 1, may_yield=True
        ):
            self._step.put(seq, 1)

    def _continue_prefill(self, seq: Sequence) -> None:
        if seq.status is not RequestStatus.RUNNING:
            return
        chunk = self._admission.chunk(seq, seq.num_computed, seq.num_known_at_start)
        chunk = self._kv.cut(seq.table, seq.num_computed, chunk)
        has_turn = chunk > 0 and self._admission.has_prefill_slot()
        if has_turn and self._grow(seq, seq.num_computed + chunk):
            self._step.put(seq, chunk)

    def _grow(self, seq: Sequence, num_tokens: int, *, may_yield: bool = False) -> bool:
        """Blocks so that num_tokens fit, preempting juniors; False if the sequence has to wait."""
        while not self._try_grow(seq, num_tokens):
            if not self._make_room(seq, may_yield):
                return False
        return True

    def _try_grow(self, seq: Sequence, num_tokens: int) -> bool:
        """The same if some are free; nobody is preempted for it."""
        blocks = self._kv.grow(seq.table, num_tokens)
        if blocks:
            seq.room = len(seq.table.blocks) * self._kv.block_size
            self._step.add_blocks(seq, blocks)
        return blocks is not None

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
