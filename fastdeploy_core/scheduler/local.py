"""The in-process request scheduler, driver `local`: one bounded, fair queue in front of one engine.

It lives in the engine's own process, so a request cannot lose its engine without losing this queue,
too: there are no leases and no second attempts. A paused process (SIGSTOP, a frozen container) goes
on where it stopped. Deadlines and ttl_s are time that a client waits, so a pause counts for them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import msgspec

from fastdeploy_core.config import RequestSchedulerConfig
from fastdeploy_core.contracts.scheduler import Capacity, InstanceLoad, SchedulerCapabilities
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.types import (
    FinishReason,
    Request,
    RequestOutputDelta,
    SequenceDelta,
    TokenDeltas,
    split_branch_id,
)

from .fair_queue import FairQueue

# Aborts may overtake their requests; how many, and how long, are remembered.
MAX_EARLY_ABORTS = 4096
EARLY_ABORT_S = 60.0
_POSITION = attrgetter("position")


@dataclass(eq=False)
class _Entry:
    """An unfinished request."""

    request: Request
    queued_s: float
    expires_s: float  # nobody waits for its turn any longer
    is_queued: bool = True
    waited_s: float = 0.0
    position: int = 0  # of the next delta
    finished_indices: set[int] = field(default_factory=set)


class LocalScheduler:
    """RequestScheduler of one process."""

    name = "local"
    contract = (1, 0)
    capabilities = SchedulerCapabilities()

    def __init__(
        self, config: RequestSchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if config.options:
            raise ConfigError(
                f"request scheduler 'local' has no options, got {', '.join(config.options)}; name "
                "the scheduler that has them with --scheduler-name (`fastdeploy plugins list "
                "--kind scheduler` shows what is installed)"
            )
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._has_requests = threading.Condition(self._lock)
        self._has_results = threading.Condition(self._lock)
        self._entries: dict[str, _Entry] = {}
        self._queue: FairQueue[_Entry] = FairQueue()
        self._num_queued_tokens = 0
        self._results: list[RequestOutputDelta | TokenDeltas] = []
        self._aborts: list[str] = []
        self._early_aborts: OrderedDict[str, float] = OrderedDict()
        self._sweep_s = math.inf  # no queued request expires before
        self._loads: dict[str, tuple[InstanceLoad, float]] = {}  # and when it was reported
        self._running: tuple[object, list[_Entry]] = (None, [])  # see _publish_tokens
        self._is_closed = False

    @property
    def num_queued(self) -> int:
        """Requests that no engine has taken yet."""
        return len(self._queue)

    def put_requests(self, requests: Sequence[Request]) -> list[str | None]:
        """Queue requests; one entry each: None, or why it was refused."""
        with self._lock:
            self._sweep()
            answers = [self._put(request) for request in requests]
            self._has_requests.notify()
            return answers

    def get_requests(self, capacity: Capacity, timeout_s: float = 0.0) -> list[Request]:
        """Take at most what fits, in turn of priority, tenant and arrival; nothing overtakes the
        first that does not fit. Blocks are the only engine's own business: it knows which of them
        requests share, and what does not fit yet waits there as well as here."""
        with self._lock:
            self._sweep()
            if not self._queue and timeout_s > 0 and not self._is_closed:
                self._has_requests.wait(timeout_s)
                self._sweep()
            return self._take(capacity)

    def put_results(self, outputs: Sequence[RequestOutputDelta | TokenDeltas]) -> None:
        """Publish deltas; other attempts and repeats are dropped, a gap fails the request."""
        with self._lock:
            for output in outputs:
                if isinstance(output, TokenDeltas):
                    self._publish_tokens(output)
                else:
                    self._publish(output)
            if self._results:
                self._has_results.notify()

    def get_results(self, timeout_s: float = 0.0) -> list[RequestOutputDelta | TokenDeltas]:
        """What is new for the clients."""
        with self._lock:
            self._sweep()
            if not self._results and timeout_s > 0 and not self._is_closed:
                self._has_results.wait(timeout_s)
                self._sweep()
            results, self._results = self._results, []
            return results

    def abort(self, request_ids: Sequence[str]) -> None:
        """Cancel wherever the request is, and answer that; an abort may come before its request."""
        with self._lock:
            for name in request_ids:
                request_id, branch = split_branch_id(name)
                entry = self._entries.get(request_id)
                if entry is not None and not entry.is_queued:
                    self._aborts.append(name)
                if entry is not None and branch is None:
                    self._answer(entry, None, "")
                elif branch is None:
                    self._early_aborts[request_id] = self._clock()
                    if len(self._early_aborts) > MAX_EARLY_ABORTS:
                        self._early_aborts.popitem(last=False)
            self._has_requests.notify()  # an idle engine may have aborts to take

    def get_aborts(self) -> list[str]:
        """Requests the engine has taken and must stop."""
        if not self._aborts:
            return []
        with self._lock:
            aborts, self._aborts = self._aborts, []
            return aborts

    def report_load(self, load: InstanceLoad) -> None:
        """Keep what the engine says of itself."""
        with self._lock:
            self._loads[load.instance] = load, self._clock()

    def loads(self) -> list[InstanceLoad]:
        """What the engine said last."""
        with self._lock:
            now = self._clock()
            return [replace(load, age_s=now - then) for load, then in self._loads.values()]

    def close(self) -> None:
        """Answer whatever is unfinished and wake who waits."""
        with self._lock:
            self._is_closed = True
            for entry in list(self._entries.values()):
                self._answer(entry, "the server is shutting down", "Aborted")
            self._has_requests.notify_all()
            self._has_results.notify_all()

    def _put(self, request: Request) -> str | None:
        request_id = request.request_id
        if self._is_closed:
            return "unavailable: the server is shutting down"
        if request_id in self._entries:
            return f"duplicate request id: {request_id!r:.80} is unfinished"
        config, num_tokens = self._config, len(request.prompt_token_ids)
        if config.max_size and len(self._queue) >= config.max_size:
            return (
                f"queue full: {len(self._queue)} requests wait, at most {config.max_size} may; "
                "try again later"
            )
        if config.max_tokens and self._queue:
            total = self._num_queued_tokens + num_tokens
            if total > config.max_tokens:
                return (
                    f"queue full: with this one {total} prompt tokens would wait, at most "
                    f"{config.max_tokens} may; try again later"
                )
        now, most_s = self._clock(), config.ttl_s
        if request.deadline_s is not None:
            most_s = min(most_s, request.deadline_s)
        self._entries[request_id] = entry = _Entry(request, now, now + most_s)
        self._sweep_s = min(self._sweep_s, entry.expires_s)
        self._queue.arrive(request.tenant)
        self._queue.push(entry, request.tenant, request.priority)
        self._num_queued_tokens += num_tokens
        if self._early_aborts.pop(request_id, None) is not None:
            self._answer(entry, None, "")
        return None

    def _dequeue(self, entry: _Entry) -> None:
        entry.is_queued = False
        self._queue.remove(entry)
        self._queue.running[entry.request.tenant] += 1
        self._num_queued_tokens -= len(entry.request.prompt_token_ids)

    def _take(self, capacity: Capacity) -> list[Request]:
        now = self._clock()
        num_tokens = capacity.num_tokens
        taken: list[Request] = []
        while (entry := self._queue.peek()) is not None:
            request, more = entry.request, capacity.num_requests - len(taken)
            if more <= 0 and (self._queue.running[request.tenant] or more <= -capacity.num_tenants):
                break
            if request.request_id in self._aborts:
                break  # the engine still runs an aborted request of this id
            size = len(request.prompt_token_ids)
            num_tokens -= size
            if num_tokens < 0:
                break
            self._dequeue(entry)
            entry.waited_s = now - entry.queued_s
            self._queue.charge(request.tenant, size)
            if request.deadline_s is not None:
                left = max(0.0, request.deadline_s - entry.waited_s)
                request = msgspec.structs.replace(request, deadline_s=left)
            taken.append(request)
        return taken

    def _publish_tokens(self, tokens: TokenDeltas) -> None:
        """All of them as they are, if all are as expected."""
        names = tokens.request_ids, tokens.attempts
        if self._running[0] != names:  # they nearly always stay from step to step
            found = [
                (self._entries.get(name), attempt) for name, attempt in zip(*names, strict=True)
            ]
            entries = [e for e, a in found if e and not e.is_queued and e.request.attempt == a]
            self._running = names, entries
        entries = self._running[1]
        if list(map(_POSITION, entries)) != tokens.positions:  # or fewer
            for delta in tokens:
                self._publish(delta)
            return
        for entry in entries:
            entry.position += 1
        self._results.append(tokens)

    def _publish(self, delta: RequestOutputDelta) -> None:
        entry = self._entries.get(delta.request_id)
        if entry is None or entry.is_queued or delta.attempt != entry.request.attempt:
            return
        if delta.position < entry.position:
            return
        if delta.position > entry.position:
            self._aborts.append(delta.request_id)
            self._answer(
                entry,
                f"output of this request was lost between deltas {entry.position} and "
                f"{delta.position}",
                "FastDeployError",
            )
            return
        entry.position += 1
        if delta.position == 0 and delta.queue_s is not None:
            delta.queue_s += entry.waited_s
        for seq in delta.sequences:
            if seq.finish_reason is not None:
                entry.finished_indices.add(seq.index)
        self._results.append(delta)
        if delta.finished:
            self._forget(entry)

    def _answer(self, entry: _Entry, error: str | None, error_type: str) -> None:
        """The last delta of a request, made here instead of by an engine."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        request = entry.request
        if entry.is_queued:
            self._dequeue(entry)
        self._results.append(
            RequestOutputDelta(
                request_id=request.request_id,
                position=entry.position,
                attempt=request.attempt,
                sequences=[
                    SequenceDelta(index=index, finish_reason=reason)
                    for index in range(request.sampling.n)
                    if index not in entry.finished_indices
                ],
                finished=True,
                error=error,
                error_type=error_type,
            )
        )
        self._forget(entry)
        self._has_results.notify()

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.request.request_id]
        self._running = None, []
        self._queue.running[entry.request.tenant] -= 1
        self._queue.depart(entry.request.tenant)

    def _sweep(self) -> None:
        """Answer what waited too long."""
        now = self._clock()
        if now >= self._sweep_s:
            for entry in [entry for entry in self._queue if entry.expires_s <= now]:
                self._expire(entry, now - entry.queued_s)
            self._sweep_s = min((entry.expires_s for entry in self._queue), default=math.inf)
        while self._early_aborts and now - next(iter(self._early_aborts.values())) > EARLY_ABORT_S:
            self._early_aborts.popitem(last=False)

    def _expire(self, entry: _Entry, waited_s: float) -> None:
        ttl_s, deadline_s = self._config.ttl_s, entry.request.deadline_s
        error = "the request did not start within its deadline"
        if deadline_s is None or ttl_s <= deadline_s:
            error = f"the request waited {waited_s:.1f} s, at most {ttl_s:g} s are allowed; "
            error += "try again later"
        self._answer(entry, error, "RequestTimeout")
