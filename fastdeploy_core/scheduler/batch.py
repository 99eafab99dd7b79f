"""The batch scheduler: who runs this step. (Which instance gets a request is the request
scheduler.)

Continuous batching with chunked prefill. `schedule` may be called again before `update` has seen
the step before (overlap); results are taken in the order of the steps."""

from __future__ import annotations

import copy
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from fastdeploy_core.errors import InvalidRequest, RequestTooLong
from fastdeploy_core.kvcache import KVCacheManager
from fastdeploy_core.types import (
    FinishReason,
    ModelRunnerOutput,
    Request,
    RequestOutputDelta,
    RequestStatus,
    split_branch_id,
)
from fastdeploy_core.types.engine import EngineStats
from fastdeploy_core.types.sampling import mix64, sequence_seed

from .draft_policy import DraftPolicy
from .outcome import Outcome
from .planner import StepPlanner
from .roster import Roster
from .sequence import RequestState, Sequence
from .settings import SchedulerSettings
from .step import ScheduledStep


class BatchScheduler:
    """Takes requests, gives steps, takes their results, gives deltas. Not thread-safe."""

    def __init__(
        self,
        settings: SchedulerSettings,
        kv: KVCacheManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.kv = kv
        # The engine counts here, too; gauges are filled in when somebody asks.
        self.counters = EngineStats(
            requests_finished_total=Counter(), requests_rejected_total=Counter()
        )
        self._clock = clock
        by_priority, drafts = settings.batch.policy == "priority", settings.num_speculative_tokens
        self.roster = Roster(kv, by_priority=by_priority, clock=clock, num_drafts=drafts)
        self.outcome = Outcome(self.roster, self.counters)
        self.take_deltas = self.outcome.take_deltas  # for clients, since the last call
        self._policy: DraftPolicy | None = None
        if settings.speculative is not None:
            is_captured = settings.device.captures_drafts
            self._policy = DraftPolicy(settings.speculative, is_captured=is_captured)
        self._results_s: float | None = None  # when results came last, if there was more to do
        self.planner = StepPlanner(
            self.roster, settings, self.counters, self._fail_stuck, self._policy
        )
        self._deadlines: list[tuple[float, str]] = []
        self._next_seq_id = 0

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one sequence: the model's, or the pool's if that is smaller."""
        return min(self.settings.max_model_len, self.kv.pool.num_blocks * self.kv.block_size)

    @property
    def num_requests(self) -> int:
        """Unfinished requests."""
        return len(self.roster.requests)

    @property
    def num_sequences(self) -> int:
        """Sequences in the batch, and those that wait for room."""
        return len(self.roster.running) + self.roster.num_waiting

    @property
    def num_held(self) -> int:
        """Requests that `hold` took out of the queue."""
        return len(self.roster.held)

    def has_work(self) -> bool:
        """Whether a request can run or has passed its deadline, an answer is not yet given, or
        blocks are to be copied. What waits for another instance alone is no work."""
        can_run = len(self.roster.requests) > self.num_held
        if can_run or self.outcome.has_deltas or self.kv.has_copies:
            return True
        return bool(self.num_held and self._deadlines and self._deadlines[0][0] <= self._clock())

    def leader(self, request_id: str) -> Sequence | None:
        """The first sequence of a request whose prompt may come from the prefix cache; None: it has
        ended, or its prompt is to be computed."""
        request = self.roster.requests.get(request_id)
        return None if request is None or request.wants_prompt_logprobs else request.sequences[0]

    def hold(self, request_id: str) -> None:
        """A request that has not started waits for its prompt from elsewhere, or its grammar."""
        if request_id in self.roster.requests:
            self.roster.hold(self.roster.requests[request_id])

    def release(self, request_id: str, first: RequestOutputDelta | None = None) -> None:
        """What a held request waited for has come, or never will: it waits for its turn. With
        `first`: only its first token has come. Ids of requests that have ended are ignored."""
        if request_id in self.roster.held:
            request = self.roster.requests[request_id]
            if first is None:
                self.roster.release(request)
            else:
                self.outcome.take_first(request, first)

    def add(self, request: Request) -> None:
        """Queue a request, or raise InvalidRequest; the scheduler is unchanged then. A newer
        attempt takes the place of an older one, whose output nobody wants any more."""
        self.check(request)
        if request.request_id in self.roster.requests:
            self.abort([request.request_id])
        state = RequestState(request, self._clock())
        self._make_sequences(state)
        self.counters.requests_total += 1
        self.counters.prompt_tokens_total += len(request.prompt_token_ids)
        self.roster.add(state)
        is_run = state.wants_prompt_logprobs or request.is_pooled
        if request.sampling.max_tokens == 0 and not is_run:
            self.outcome.complete_empty(state)
        elif state.deadline_s is not None:
            heapq.heappush(self._deadlines, (state.deadline_s, request.request_id))

    def check(self, request: Request) -> None:
        """Raise InvalidRequest for what can never run, with the arithmetic."""
        running = self.roster.requests.get(request.request_id)
        if running is not None and running.request.attempt >= request.attempt:
            raise InvalidRequest(
                f"duplicate request id: {request.request_id!r:.80} is unfinished",
                param="request_id",
            )
        num_tokens = len(request.prompt_token_ids)
        if not num_tokens:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        least, kv = num_tokens + (request.sampling.max_tokens != 0), self.kv
        if least <= self.max_request_tokens:
            return
        why = (
            f" and needs {kv.num_blocks_for(least)} KV blocks of {kv.block_size} tokens with its "
            f"first output token; the pool has {kv.pool.num_blocks} blocks in all, so at most "
            f"{self.max_request_tokens} tokens fit; shorten the prompt or give the KV cache more "
            "memory"
        )
        if least > (longest := self.settings.max_model_len):
            why = f"; the model's context is {longest} tokens, at least one of which must be left "
            why += "to generate; shorten the prompt"
        raise RequestTooLong(f"the prompt has {num_tokens} tokens{why}", param="prompt")

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without a further delta; unknown ids are ignored. A branch id ends one
        sequence, with a delta, since the others go on."""
        for name in request_ids:
            request_id, branch = split_branch_id(name)
            request = self.roster.requests.get(request_id)
            if request is not None and branch is not None:
                self.outcome.end_branch(request, branch)
            elif request is not None:
                self.roster.finish_request(request)
                self.counters.requests_finished_total[FinishReason.ABORT.value] += 1
                self.outcome.discard(request_id)

    def schedule(self, most_steps: Mapping[int, int] | None = None) -> ScheduledStep | None:
        """The next step; None: nothing can run yet. most_steps: by seq_id, how many steps of the
        sequence may be in flight; the others' number is not limited."""
        if self._deadlines:
            self._expire()
        return self.planner.plan(most_steps or {})

    def update(self, step: ScheduledStep, output: ModelRunnerOutput) -> None:
        """Take in a step's results; `take_deltas` has the answers."""
        num_before = self.counters.generation_tokens_total
        self.outcome.apply(step, output)
        if not step.num_tokens:  # it only copied blocks
            return
        self.planner.note(step, output)
        if self._policy is None or self._policy.rests(step.num_decodes):
            self._results_s = None
        else:
            # Everything since the results before these; tokens after an answer's end do not count.
            now, before = self._clock(), self._results_s
            self._results_s = now if self.roster.running or self.roster.num_leaving else None
            num_tokens = self.counters.generation_tokens_total - num_before
            self._policy.observe(step, num_tokens, 0.0 if before is None else now - before)

    def fail(self, steps: list[ScheduledStep], message: str) -> None:
        """The first of these steps failed, and the later ones, submitted before that was known, are
        void. A sequence that was alone in the failed step is to blame and fails; others are tried
        again, each alone. Nothing of the prefix cache is trusted any more."""
        self.kv.clear_cache()
        failed = steps[0]
        seqs = failed.seqs()
        for seq in seqs:
            if seq.status is not RequestStatus.FINISHED:
                self.roster.set_suspect(seq, True)
        for step in steps:
            self.outcome.undo(step)
        if len(seqs) == 1:
            self.outcome.fail(seqs[0].request, message, "FastDeployError")

    def fail_oldest(self, message: str) -> None:
        """End the request that has waited longest; for states that should not exist."""
        requests, held = self.roster.requests, self.roster.held
        oldest = next(name for name in requests if name not in held)
        self.outcome.fail(requests[oldest], message, "OutOfBlocks")

    def stats(self) -> EngineStats:
        """The counters as they are, with the gauges of now; from any thread."""
        stats, pool, tiers = copy.copy(self.counters), self.kv.pool, self.kv.tiers
        stats.requests_finished_total = dict(stats.requests_finished_total)
        stats.requests_rejected_total = dict(stats.requests_rejected_total)
        stats.num_running, stats.num_waiting = len(self.roster.running), self.roster.num_waiting
        stats.num_requests = self.num_requests
        stats.num_blocks_total, stats.num_blocks_free = pool.num_blocks, pool.num_available
        stats.num_blocks_used, stats.num_blocks_cached = pool.num_used, pool.num_cached
        stats.num_blocks_quarantined = pool.num_quarantined
        stats.num_host_blocks_total = sum(tier.num_blocks for tier in tiers)
        stats.num_host_blocks_used = sum(tier.num_used for tier in tiers)
        stats.host_saved_blocks_total = sum(tier.num_saved_total for tier in tiers)
        stats.preemptions_total = self.roster.num_preemptions_total
        tally = self.roster.columns.tally
        stats.drafts_total = tally.num_steps
        stats.accepted_drafts_at_total = tally.accepted_at.tolist()
        stats.draft_tokens_total = tally.num_drafted
        stats.accepted_draft_tokens_total = int(tally.accepted_at.sum())
        return stats

    def check_idle(self) -> None:
        """Raise AssertionError unless the pool is as it began; call without unfinished requests."""
        assert not self.roster.requests, "requests are unfinished"
        assert not self.roster.num_leaving, "a step in flight still holds blocks"
        self.kv.check()
        assert self.kv.num_used == 0, f"{self.kv.num_used} blocks are leaked"

    def _make_sequences(self, state: RequestState) -> None:
        request, sampling = state.request, state.request.sampling
        limit = self.max_request_tokens
        if sampling.max_tokens is not None:
            limit = min(limit, len(request.prompt_token_ids) + sampling.max_tokens)
        seed = sampling.seed
        if seed is None:
            # Reproducible for an engine that gets the same requests in the same order.
            seed = mix64(self.settings.seed) ^ mix64(self._next_seq_id)
        for index in range(sampling.n):
            table = self.kv.new_table(request.cache_salt, request.extras)
            own_seed, columns = sequence_seed(seed, index), self.roster.columns
            seq = Sequence(self._next_seq_id, index, state, table, own_seed, limit, columns)
            state.sequences.append(seq)
            self._next_seq_id += 1
        state.num_unfinished = sampling.n
        state.followers_wait = sampling.n > 1 and self.settings.device.block_sharing

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            request = self.roster.requests.get(request_id)
            if request is None or request.deadline_s is None or request.deadline_s > now:
                continue
            limit = f"its deadline of {request.request.deadline_s:g} s"
            late = f"the request did not finish within {limit}"
            self.outcome.fail(request, late, "RequestTimeout")

    def _fail_stuck(self, seq: Sequence) -> None:
        pool = self.kv.pool
        self.outcome.fail(
            seq.request,
            f"no room in the KV cache: the request has {len(seq.token_ids)} tokens and needs "
            f"{self.kv.num_blocks_for(len(seq.token_ids) + 1)} blocks; {pool.num_available} of "
            f"{pool.num_blocks} are free and {pool.num_quarantined} withheld, with nothing else "
            "running; try again later",
            "OutOfBlocks",
        )
