"""From waiting to running: whose turn it is, whether there is room, and how much of a prompt
runs."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_core.kvcache import NO_MATCH, PrefixMatch
from fastdeploy_core.types.engine import EngineStats

from .roster import Roster
from .sequence import Sequence
from .settings import SchedulerSettings
from .step import FAR, StepBuilder

MAX_PASSED_OVER = 64
ADAPTER_PATIENCE_S = 1.0  # what waits longer for a slot is not overtaken by what has one


class Admission:
    """Puts rows of waiting sequences into the step under construction."""

    def __init__(
        self,
        roster: Roster,
        settings: SchedulerSettings,
        counters: EngineStats,
        step: StepBuilder,
        on_stuck: Callable[[Sequence], None],
    ) -> None:
        self._roster = roster
        self._kv = roster.kv
        self._batch = settings.batch
        self._max_prefills = settings.device.max_prefills_per_step
        self._counters = counters
        self._step = step
        self._on_stuck = on_stuck
        self._max_adapters, self._keeps_slots = settings.max_adapters, False
        self._holds_long = False
        self._used: set[str] = set()  # adapters of running sequences
        self._watermark = max(1, roster.kv.pool.num_blocks // 100)

    def admit(self, *, holds_long: bool = False) -> None:
        """Start waiting sequences while there are places, budget and blocks; none that is longer
        than FAR with holds_long."""
        self._holds_long = holds_long
        if not self._roster.num_waiting:
            return
        passed_over: set[Sequence] = set()
        if self._max_adapters:
            self._used = {seq.table.scope[1] for seq in self._roster.running} - {""}
            self._keeps_slots = False
        while (
            self._step.budget > 0
            and len(self._roster.running) < self._batch.max_num_seqs
            and self.has_prefill_slot()
            and len(passed_over) < MAX_PASSED_OVER
        ):
            seq = self._roster.next_waiting(passed_over)
            if seq is None:
                break
            if self._must_let_pass(seq) or self._lacks_slot(seq):
                passed_over.add(seq)
            elif not self.try_start(seq):
                break
            elif adapter := seq.table.scope[1]:
                self._used.add(adapter)

    def try_start(self, seq: Sequence) -> bool:
        """Give a waiting sequence its first blocks and a row; False if it has to wait."""
        request = seq.request
        source = request.fork_source
        is_follower = seq.index > 0 and len(seq.token_ids) == seq.num_prompt_tokens
        if source is not None and is_follower:
            if self._kv.pool.num_available < 1 + self._num_watermark():
                return self._refuse(seq)
            self._kv.fork(source, seq.table)
            self._roster.start(seq, source.num_tokens - 1)
            self._roster.forked(request)
            self._step.put_new(seq, 1)
            return True
        match = NO_MATCH
        if not request.wants_prompt_logprobs:
            match = self._kv.match(seq.table, seq.token_ids)
        num_left = len(seq.token_ids) - match.num_tokens
        chunk = self.chunk(seq, match.num_tokens, len(seq.token_ids), is_new=True)
        if chunk < 1 or (chunk < num_left and not self._may_run_in_parts(num_left)):
            return False
        if not self._has_room(seq, match):
            return self._refuse(seq)
        chunk = self._kv.cut(seq.table, match.num_tokens, chunk)
        self._kv.start(seq.table, match, match.num_tokens + chunk)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = match.num_tokens
            self._roster.arrived.charge(request.tenant, num_left)
            self._counters.prefix_query_tokens_total += seq.num_prompt_tokens
            self._counters.prefix_hit_tokens_total += match.num_tokens
        self._counters.host_hit_tokens_total += match.num_host_tokens
        self._roster.start(seq, match.num_tokens)
        self._step.put_new(seq, chunk)
        return True

    def _refuse(self, seq: Sequence) -> bool:
        """No room for a waiting sequence. If nobody runs whose blocks could come back, it would
        wait for ever: it gets the blocks held for forks, or fails."""
        roster = self._roster
        is_alone = not (roster.running or roster.num_leaving)
        if is_alone and not roster.drop_fork_sources():
            self._on_stuck(seq)
        return False

    def chunk(self, seq: Sequence, start: int, end: int, *, is_new: bool = False) -> int:
        """How many of a prompt's tokens from `start` to `end` may run in this step."""
        threshold = self._batch.long_prefill_token_threshold or end
        chunk = min(end - start, self._step.budget, threshold)
        if not seq.table.embeddings:
            return chunk
        return self._step.within_encoding(seq, start, chunk, is_new=is_new)

    def has_prefill_slot(self) -> bool:
        """Whether the device takes one more prefill in this step."""
        return self._max_prefills is None or self._step.num_prefills < self._max_prefills

    def _may_run_in_parts(self, num_left: int) -> bool:
        """Whether a prompt of which so much is left may be split: beside as many as may be, only if
        each of them has more than twice of it left. Never without chunked prefill: any sequence
        fits a step then, as the engine checks."""
        begun, batch = self._roster.prefilling(), self._batch
        return batch.enable_chunked_prefill and (
            len(begun) < batch.max_num_partial_prefills
            or all(s.num_known_at_start - s.num_computed > 2 * num_left for s in begun)
        )

    def _must_let_pass(self, seq: Sequence) -> bool:
        """Whether shorter prompts may overtake this long one, since enough long ones run."""
        threshold, size = self._batch.long_prefill_token_threshold, len(seq.token_ids)
        is_split = self._batch.enable_chunked_prefill and size > self._step.budget
        if (self._holds_long and size > FAR) or (is_split and not self._may_run_in_parts(size)):
            return True
        is_long = size > threshold
        if not threshold or self._batch.max_num_partial_prefills == 1 or not is_long:
            return False
        num_long = sum(s.num_known_at_start > threshold for s in self._roster.prefilling())
        return num_long >= self._batch.max_long_partial_prefills

    def _lacks_slot(self, seq: Sequence) -> bool:
        """Whether its LoRA adapter has to wait until all sequences of another one have ended."""
        adapter = seq.table.scope[1]
        if not adapter:
            return False
        if adapter in self._used or len(self._used) < self._max_adapters:
            return self._keeps_slots
        self._keeps_slots |= self._roster.clock() - seq.request.arrival_s > ADAPTER_PATIENCE_S
        return True

    def _has_room(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Room for all of the sequence and its next token, beside what running prompts still need:
        to start it and preempt it again in mid-prompt would be wasted work."""
        kv = self._kv
        if not self._roster.running:
            return kv.has_room(match, len(seq.token_ids))
        spare = self._roster.num_promised_blocks + self._num_watermark()
        return kv.has_room(match, len(seq.token_ids) + 1, spare)

    def _num_watermark(self) -> int:
        """Blocks left free at an admission, so that the next decodes do not preempt it at once."""
        return self._watermark if self._roster.running else 0
