"""Who is waiting, who is running, and every move between these states.

The rule that keeps overlap safe: blocks go back to the pool only when no submitted step touches
them any more (`settle`), whatever ended or preempted the sequence before.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Container
from operator import attrgetter, itemgetter

import numpy as np

from fastdeploy_core.kvcache import KVCacheManager
from fastdeploy_core.types import RequestStatus

from .columns import Columns
from .fair_queue import FairQueue
from .sequence import GREEDY, RequestState, Sequence

_seniority = attrgetter("rank")
YIELD_EVERY_S = 0.25  # a tenant's turn at a place of another costs what is computed again


class Roster:
    """All unfinished requests of an engine."""

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        by_priority: bool,
        clock: Callable[[], float] = time.monotonic,
        num_drafts: int = 0,
    ) -> None:
        self.kv = kv
        self.clock = clock
        self.columns = Columns(num_drafts)
        self.requests: dict[str, RequestState] = {}
        self.held: set[str] = set()  # ids of those that `hold` took out of the queue
        self.running: list[Sequence] = []  # senior first
        self.returning: list[Sequence] = []  # preempted or forked, senior first
        self.arrived: FairQueue[Sequence] = FairQueue()
        self.num_leaving = 0  # sequences whose blocks come back with a step in flight
        self.num_suspects = 0
        self.num_preemptions_total = 0
        self._by_priority = by_priority
        self._admissions, self._yields_s = 0, 0.0  # and when a place may go to another tenant
        # Ids that workers need not remember, told with the next step; twice does no harm.
        self.forgotten: list[int] = []
        self._begun: list[Sequence] = []  # those of them that were being fed when last looked at
        self._places: np.ndarray | None = None  # of the running sequences, while these stay
        self.kind = GREEDY  # the greatest of their kinds; see running_places

    @property
    def num_waiting(self) -> int:
        """Sequences that could run if there were room."""
        return len(self.returning) + len(self.arrived)

    def running_places(self) -> np.ndarray:
        """Places of the running sequences, senior first."""
        if self._places is None:
            self._places = np.array([seq.place for seq in self.running], dtype=np.int64)
            self.kind = max(self.columns.kind[self._places].tolist(), default=GREEDY)
        return self._places

    def prefilling(self) -> list[Sequence]:
        """Running sequences that have yet to be fed what they started with, senior first."""
        if self._begun:
            running = RequestStatus.RUNNING
            self._begun = [s for s in self._begun if s.status is running and s.is_prefill]
        return self._begun.copy()

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that running prompts still need."""
        kv = self.kv
        return sum(
            max(0, kv.num_blocks_for(seq.num_known_at_start) - len(seq.table.blocks))
            for seq in self.prefilling()
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a new request could get: those of the pool that nobody references, less what
        running prompts and waiting sequences need without the prefix cache's help."""
        needed = self.num_promised_blocks if self._begun else 0
        if self.num_waiting:  # asked in every step, in most of which nobody waits
            waiting = (*self.returning, *self.arrived)
            needed += sum(self.kv.num_blocks_for(len(seq.token_ids) + 1) for seq in waiting)
        return max(0, self.kv.pool.num_available - needed)

    def add(self, request: RequestState) -> None:
        """Queue a request's first sequence; the others follow with `release_followers`."""
        self.requests[request.request_id] = request
        self.arrived.arrive(request.tenant)
        self._arrive(request)

    def hold(self, request: RequestState) -> None:
        """Take a request that has not started out of the queue until `release`."""
        assert all(seq.status is RequestStatus.WAITING for seq in request.sequences)
        for seq in request.sequences:
            self.arrived.remove(seq)
            seq.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self.held.add(request.request_id)

    def release(self, request: RequestState) -> None:
        """Queue a held request again."""
        self.held.discard(request.request_id)
        for seq in request.sequences:
            if seq.status is RequestStatus.WAITING_FOR_REMOTE_KV:
                seq.status = RequestStatus.WAITING
        self._arrive(request)

    def next_waiting(self, passed_over: Container[Sequence] = ()) -> Sequence | None:
        """Whose turn it is: among equal priorities, a tenant's of whom nothing runs, and of these a
        preempted or forked sequence before a new one."""
        returning = next((seq for seq in self.returning if seq not in passed_over), None)
        arrived = self.arrived.peek(passed_over)
        if returning is None or arrived is None:
            return returning or arrived
        running, new, old = self.arrived.running, arrived.request, returning.request
        turn = self._priority(new), running[new.tenant] > 0
        return arrived if turn < (returning.rank[0], running[old.tenant] > 0) else returning

    def yield_place(self) -> None:
        """The next that waits gets the newest place of the tenant that runs most, if nothing runs
        of its own tenant."""
        seq, running, now = self.next_waiting(), self.arrived.running, self.clock()
        tenant, most = max(running.items(), key=itemgetter(1), default=("", 0))
        if seq is None or running[seq.request.tenant] or most < 2 or now < self._yields_s:
            return
        newest = next(s for s in reversed(self.running) if s.request.tenant == tenant)
        if newest.rank[0] >= self._priority(seq.request):
            self._yields_s = now + YIELD_EVERY_S
            self.preempt(newest)

    def start(self, seq: Sequence, num_computed: int) -> None:
        """Move a waiting sequence, which has got its blocks, to the running ones; num_computed of
        its tokens are in these already."""
        request = seq.request
        if not self.arrived.remove(seq):
            self.returning.remove(seq)
        if request.admission < 0:
            request.admission = self._admissions
            request.queue_s = self.clock() - request.arrival_s
            self._admissions += 1
        seq.rank = (self._priority(request), request.admission, seq.index)
        seq.status = RequestStatus.RUNNING
        seq.num_computed, seq.num_known_at_start = num_computed, len(seq.token_ids)
        seq.room = len(seq.table.blocks) * self.kv.block_size
        seq.commit_at = self.kv.next_commit(seq.table, seq.num_prompt_tokens)
        seq.show_plain()
        bisect.insort(self.running, seq, key=_seniority)
        self.arrived.running[request.tenant] += 1
        if seq not in self._begun:
            bisect.insort(self._begun, seq, key=_seniority)
        self._places = None

    def release_followers(self, request: RequestState) -> None:
        """The prompt is computed: let the other sequences of the request wait for their turn."""
        request.followers_wait = False
        leader = request.sequences[0]
        if leader.table.blocks and not self.kv.bounded:  # else followers find the prompt cached
            request.fork_source = self.kv.hold(leader.table, leader.num_prompt_tokens)
        for seq in request.sequences[1:]:
            if seq.status is RequestStatus.WAITING:
                seq.rank = (leader.rank[0], leader.rank[1], seq.index)
                bisect.insort(self.returning, seq, key=_seniority)

    def drop_fork_source(self, request: RequestState) -> None:
        """Let go of a prompt held for forking, if one is."""
        if request.fork_source is not None:
            self.kv.drop(request.fork_source)
            request.fork_source = None

    def drop_fork_sources(self) -> bool:
        """Memory is short: followers will find the prompt in the prefix cache or compute it.
        False if nothing was held."""
        held = [r for r in self.requests.values() if r.fork_source is not None]
        for request in held:
            self.drop_fork_source(request)
        return bool(held)

    def preempt(self, seq: Sequence) -> None:
        """Stop a running sequence; it will start again from what it knows by then."""
        self._stop(seq)
        seq.status = RequestStatus.PREEMPTED
        self.columns.asked[seq.place] = 0
        self.forgotten.append(seq.seq_id)
        self.num_preemptions_total += 1
        self._leave(seq)

    def finish(self, seq: Sequence) -> None:
        """End a sequence, and its request with the last one."""
        if seq.status is RequestStatus.FINISHED:
            return
        if seq.status is RequestStatus.RUNNING:
            self._stop(seq)
            self.forgotten.append(seq.seq_id)
        elif not self.arrived.remove(seq) and seq in self.returning:
            self.returning.remove(seq)
        was_leaving = seq.status is RequestStatus.PREEMPTED and bool(seq.num_in_flight)
        seq.status = RequestStatus.FINISHED
        self.set_suspect(seq, False)
        if not was_leaving:
            self._leave(seq)
        request = seq.request
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self.drop_fork_source(request)
            del self.requests[request.request_id]
            self.held.discard(request.request_id)
            self.arrived.depart(request.tenant)
        elif request.followers_wait and seq.index == 0:
            # It ended before the prompt was computed: the others find out for themselves.
            request.followers_wait = False
            self._arrive(request)
        else:
            self.forked(request)

    def finish_request(self, request: RequestState) -> None:
        """End every sequence of a request."""
        for seq in request.sequences:
            self.finish(seq)

    def settle(self, seq: Sequence) -> None:
        """No submitted step touches a stopped sequence any more: take its blocks back."""
        self.num_leaving -= 1
        self._free(seq)

    def set_suspect(self, seq: Sequence, is_suspect: bool) -> None:
        """Mark a sequence to be run alone, or clear it."""
        if is_suspect != seq.is_suspect:
            self.num_suspects += is_suspect - seq.is_suspect
            seq.is_suspect = is_suspect
            seq.show_plain()
            self._places = None

    def forked(self, request: RequestState) -> None:
        """A sequence has taken its share of the prompt, or needs it no more."""
        followers = request.sequences[1:]
        if all(seq.status is not RequestStatus.WAITING for seq in followers):
            self.drop_fork_source(request)

    def _arrive(self, request: RequestState) -> None:
        for seq in request.sequences[: 1 if request.followers_wait else None]:
            if seq.status is RequestStatus.WAITING:
                self.arrived.push(seq, request.tenant, self._priority(request))

    def _priority(self, request: RequestState) -> int:
        return request.request.priority if self._by_priority else 0

    def _stop(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.arrived.running[seq.request.tenant] -= 1
        self.columns.is_plain[seq.place] = False
        self._places = None

    def _leave(self, seq: Sequence) -> None:
        if seq.num_in_flight:
            self.num_leaving += 1
        else:
            self._free(seq)

    def _free(self, seq: Sequence) -> None:
        self.kv.free(seq.table)
        if seq.status is RequestStatus.FINISHED:
            if self.columns.seq_id[seq.place] == seq.seq_id:
                self.columns.release(seq.place)
            return
        seq.num_computed = seq.room = 0
        bisect.insort(self.returning, seq, key=_seniority)
