"""Chooses what runs in one step, within a token budget and the pool's blocks.

Running sequences come first (decodes, then prompts begun earlier), then waiting ones are admitted.
Without room the most junior running sequence that is not in the step yet is preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fastdeploy_core.kvcache import NO_MATCH, PrefixMatch
from fastdeploy_core.types import NewSequence, RequestStatus, ScheduledSequence, SchedulerOutput

from .counters import Counters
from .roster import Roster
from .sequence import Sequence
from .settings import SchedulerSettings

MAX_PASSED_OVER = 64


class Row(NamedTuple):
    """One row of a step, as its outcome needs it."""

    seq: Sequence
    start: int  # the first token fed
    num_tokens: int
    num_drafts: int
    sample: bool


class ScheduledStep(NamedTuple):
    """A step: the message for the workers, and what belongs to each of its rows."""

    output: SchedulerOutput
    rows: list[Row]
    num_tokens: int


class StepPlanner:
    """Plans one step after the other over a roster."""

    def __init__(
        self,
        roster: Roster,
        settings: SchedulerSettings,
        counters: Counters,
        on_stuck: Callable[[Sequence], None],
    ) -> None:
        self._roster = roster
        self._counters = counters
        self._kv = roster.kv
        self._settings = settings
        self._on_stuck = on_stuck  # called with a sequence that cannot get the blocks it needs
        self._watermark = max(1, roster.kv.pool.num_blocks // 100)
        self._is_speculative = settings.is_speculative
        self._next_step_id = 0
        self._prefills_first = True
        self._begin()

    def _begin(self) -> None:
        self._rows: list[Row] = []
        self._scheduled: list[ScheduledSequence] = []
        self._new: list[NewSequence] = []
        self._in_step: set[Sequence] = set()
        self._budget = self._settings.max_num_batched_tokens
        self._num_prefills = 0
        self._is_stalled = False  # a running sequence got no room: nobody new may start

    def plan(self) -> ScheduledStep | None:
        """The next step, or None if nothing can run before a step in flight has finished."""
        self._begin()
        if self._roster.num_suspects:
            self._plan_suspect()
        elif self._settings.mixed_batches:
            self._plan_decodes()
            self._plan_prefills()
        else:
            first, second = self._plan_prefills, self._plan_decodes
            if not self._prefills_first:
                first, second = second, first
            first()
            if not self._rows:
                second()
            self._prefills_first = not self._num_prefills
        if not self._rows:
            return None
        output = SchedulerOutput(
            step_id=self._next_step_id,
            new_sequences=self._new,
            sequences=self._scheduled,
            finished_seq_ids=self._roster.take_forgotten(),
            copies=self._kv.take_copies(),
        )
        self._next_step_id += 1
        num_tokens = self._settings.max_num_batched_tokens - self._budget
        return ScheduledStep(output, self._rows, num_tokens)

    def _plan_decodes(self) -> None:
        for seq in self._roster.running.copy():
            if seq.num_computed >= seq.num_known_at_start and self._budget > 0:
                self._decode(seq)

    def _decode(self, seq: Sequence) -> None:
        if seq.status is not RequestStatus.RUNNING:
            return  # preempted for a senior in this very step
        known = len(seq.token_ids) + seq.num_pending
        # Its last token is on its way, or its next tokens depend on drafts being verified.
        if known >= seq.max_total_tokens or (self._is_speculative and seq.num_in_flight):
            return
        drafts = seq.drafts
        if drafts:
            room = min(seq.max_total_tokens - known - 1, self._budget - 1)
            drafts = drafts[: max(0, room)]
            seq.drafts = []
        num_tokens = known - seq.num_computed + len(drafts)
        blocks = self._grow(seq, seq.num_computed + num_tokens, may_yield=True)
        if blocks is not None:
            self._put(seq, num_tokens, blocks, drafts)

    def _plan_prefills(self) -> None:
        for seq in self._roster.running.copy():
            if seq.num_computed < seq.num_known_at_start and seq.status is RequestStatus.RUNNING:
                self._continue_prefill(seq)
        if not self._is_stalled:
            self._admit()

    def _plan_suspect(self) -> None:
        """After a failed step its sequences run one by one, so that the guilty one shows."""
        roster = self._roster
        seq = next((s for s in roster.running if s.is_suspect), None)
        if seq is not None:
            if seq.num_in_flight:
                return
            if seq.is_prefill:
                self._continue_prefill(seq)
            else:
                self._decode(seq)
            return
        if roster.num_leaving:
            return
        for other in roster.running.copy():
            roster.preempt(other)
        seq = next((s for s in roster.returning if s.is_suspect), None)
        if seq is not None and not roster.num_leaving:
            self._try_start(seq)

    def _continue_prefill(self, seq: Sequence) -> None:
        chunk = self._chunk(seq.num_known_at_start - seq.num_computed)
        if chunk < 1 or not self._has_prefill_slot():
            return
        blocks = self._grow(seq, seq.num_computed + chunk, may_yield=False)
        if blocks is not None:
            self._put(seq, chunk, blocks)

    def _admit(self) -> None:
        passed_over: set[Sequence] = set()
        while (
            self._budget > 0
            and len(self._roster.running) < self._settings.max_num_seqs
            and self._has_prefill_slot()
            and len(passed_over) < MAX_PASSED_OVER
        ):
            seq = self._roster.next_waiting(passed_over)
            if seq is None:
                break
            if self._must_let_pass(seq):
                passed_over.add(seq)
            elif not self._try_start(seq):
                break

    def _try_start(self, seq: Sequence) -> bool:
        """Give a waiting sequence its first blocks and a row; False if it has to wait."""
        request = seq.request
        source = request.fork_source
        is_follower = seq.index > 0 and len(seq.token_ids) == seq.num_prompt_tokens
        if source is not None and is_follower:
            if self._kv.pool.num_available < 1 + self._num_watermark():
                return self._refuse(seq)
            self._kv.fork(source, seq.table)
            seq.num_computed = source.num_tokens - 1
            self._roster.start(seq)
            self._roster.forked(request)
            self._put_new(seq, 1)
            return True
        match = NO_MATCH
        if not request.wants_prompt_logprobs:
            match = self._kv.match(seq.table, seq.token_ids)
        num_left = len(seq.token_ids) - match.num_tokens
        chunk = self._chunk(num_left)
        if chunk < num_left and not self._may_run_in_parts(num_left):
            return False
        if not self._has_room(seq, match):
            return self._refuse(seq)
        self._kv.start(seq.table, match, match.num_tokens + chunk)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = match.num_tokens
            self._roster.arrived.charge(request.tenant, num_left)
            self._counters.num_prefix_query_tokens += seq.num_prompt_tokens
            self._counters.num_prefix_hit_tokens += match.num_tokens
        self._counters.num_host_hit_tokens += match.num_host_tokens
        seq.num_computed = match.num_tokens
        self._roster.start(seq)
        self._put_new(seq, chunk)
        return True

    def _refuse(self, seq: Sequence) -> bool:
        """No room for a waiting sequence. If nobody runs whose blocks could come back, it would
        wait for ever: it gets the blocks held for forks, or fails."""
        roster = self._roster
        if roster.running or roster.num_leaving or self._rows:
            return False
        if not roster.drop_fork_sources():
            self._on_stuck(seq)
        return False

    def _chunk(self, num_left: int) -> int:
        chunk = min(num_left, self._budget)
        threshold = self._settings.long_prefill_token_threshold
        return min(chunk, threshold) if threshold else chunk

    def _has_prefill_slot(self) -> bool:
        limit = self._settings.max_prefills_per_step
        return limit is None or self._num_prefills < limit

    def _may_run_in_parts(self, num_left: int) -> bool:
        if not self._settings.enable_chunked_prefill:
            # Only what was preempted can have grown beyond a step; it is recomputed in parts.
            return num_left > self._settings.max_num_batched_tokens and not self._rows
        partial = sum(1 for s in self._roster.running if s.is_prefill)
        return partial < self._settings.max_num_partial_prefills

    def _must_let_pass(self, seq: Sequence) -> bool:
        """Whether shorter prompts may overtake this long one, since enough long ones run."""
        settings = self._settings
        threshold = settings.long_prefill_token_threshold
        if not threshold or settings.max_num_partial_prefills == 1:
            return False
        if len(seq.token_ids) <= threshold:
            return False
        num_long = sum(
            1 for s in self._roster.running if s.is_prefill and s.num_known_at_start > threshold
        )
        return num_long >= settings.max_long_partial_prefills

    def _has_room(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Room for all of the sequence and its next token, beside what running prompts still need:
        to start it and preempt it again in mid-prompt would be wasted work."""
        kv = self._kv
        available = kv.pool.num_available
        if not self._roster.running:
            return kv.num_needed(match, len(seq.token_ids)) <= available
        promised = sum(
            max(0, kv.num_blocks_for(s.num_known_at_start) - len(s.table.blocks))
            for s in self._roster.running
            if s.is_prefill
        )
        needed = kv.num_needed(match, len(seq.token_ids) + 1)
        return needed + promised + self._num_watermark() <= available

    def _num_watermark(self) -> int:
        """Blocks left free at an admission, so that the next decodes do not preempt it at once."""
        return self._watermark if self._roster.running else 0

    def _grow(self, seq: Sequence, num_tokens: int, *, may_yield: bool) -> list[int] | None:
        """Blocks so that num_tokens fit, preempting juniors; None if the sequence has to wait."""
        while (blocks := self._kv.grow(seq.table, num_tokens)) is None:
            if not self._make_room(seq, may_yield):
                return None
        return blocks

    def _make_room(self, seq: Sequence, may_yield: bool) -> bool:
        """Free some blocks; False if none come free before the next step."""
        roster = self._roster
        self._is_stalled = True
        if roster.num_leaving:
            return False
        if roster.drop_fork_sources():
            return True
        victim = next((s for s in reversed(roster.running) if s not in self._in_step), seq)
        if victim is not seq:
            roster.preempt(victim)
            return not victim.num_in_flight
        if len(roster.running) == 1 and not seq.num_in_flight:
            self._on_stuck(seq)
        elif may_yield and len(roster.running) > 1:
            roster.preempt(seq)
        return False

    def _put(
        self, seq: Sequence, num_tokens: int, blocks: list[int], drafts: list[int] | None = None
    ) -> None:
        start = seq.num_computed
        end = start + num_tokens
        if start < seq.num_known_at_start:
            self._num_prefills += 1
        sample = end >= seq.num_known_at_start
        drafts = drafts or []
        self._scheduled.append(
            ScheduledSequence(seq.seq_id, start, num_tokens, blocks, drafts, sample)
        )
        self._rows.append(Row(seq, start, num_tokens, len(drafts), sample))
        self._in_step.add(seq)
        seq.num_computed = end
        seq.num_pending += sample
        seq.num_in_flight += 1
        self._budget -= num_tokens

    def _put_new(self, seq: Sequence, num_tokens: int) -> None:
        request = seq.request.request
        self._new.append(
            NewSequence(
                seq_id=seq.seq_id,
                token_ids=seq.token_ids.copy(),
                num_prompt_tokens=seq.num_prompt_tokens,
                block_ids=seq.table.blocks.copy(),
                sampling=request.sampling,
                seed=seq.seed,
                eos_token_ids=request.eos_token_ids,
                grammar=request.grammar,
                grammar_backend=request.grammar_backend,
                grammar_start=request.grammar_start,
            )
        )
        self._put(seq, num_tokens, [])
