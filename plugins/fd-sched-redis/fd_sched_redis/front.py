"""The front end's side: puts requests, shows each delta once, and ends requests in the queue.

A request ends in the queue only when this side has its last delta. Until then a dead instance's
requests are handed out again. Which attempt a client sees is decided here and nowhere else: the
first one that shows something, or the one that followed it while nothing was shown.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import redis

from fastdeploy_core.contracts.scheduler import InstanceLoad, RequestSchedulerConfig, error_of
from fastdeploy_core.types import (
    FinishReason,
    Request,
    RequestOutputDelta,
    SequenceDelta,
    TokenDeltas,
    split_branch_id,
)

from .bodies import Bodies
from .cell import Cell, Notice, Reach
from .link import Abort, FrontLink, Offer, Output
from .options import Options
from .routing import choose_cell, choose_instance

logger = logging.getLogger(__name__)

MAX_BEAT_S = 0.5
_chance = random.Random()  # noqa: S311, so that front ends do not beat in step
# Attempts of a request that Redis has forgotten begin this much later: no instance that still runs
# an older one can have come so far.
LOST_ATTEMPTS = 1000
CHUNK = 500  # ids of one question
_LOST = "the instance that was answering this request was lost"


class Entry:
    """An unfinished request of this front end."""

    def __init__(self, request: Request, cell: int, nonce: int) -> None:
        self.request, self.cell, self.nonce = request, cell, nonce
        self.put_s = time.monotonic()
        self.floor = 0  # attempts below it are lost
        self.attempt = -1  # that shows its output; -1: nothing was shown
        self.position = 0  # of the next delta
        self.heard_s = self.put_s  # when its newest delta came
        self.finished_indices: set[int] = set()
        self.instance = ""  # that shows its output, or was offered it
        self.is_direct = False  # offered to an instance while Redis was away
        self.is_tracked = False  # Redis knows it


class FrontSide:
    """Thread-safe. `put_lock` orders calls of put and abort; `_lock` guards what the sockets'
    thread changes as well, and is never held during a call of Redis."""

    def __init__(
        self, config: RequestSchedulerConfig, options: Options, cells: list[Cell], reach: Reach
    ) -> None:
        self._config, self._options, self._cells, self._reach = config, options, cells, reach
        self._bodies = Bodies(options)
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._put_lock = threading.RLock()
        self._lock = threading.Lock()
        self._has_results = threading.Condition(self._lock)
        self._wanted = threading.Event()
        self._entries: dict[str, Entry] = {}
        self._results: list[Output] = []
        self._ends: list[tuple[int, str, int, str]] = []  # cell, id, attempt, how
        self._cancels: list[tuple[int, str]] = []
        self._num_put = 0
        self._cursors = ["0-0"] * len(cells)
        self._waiting = [(0, 0)] * len(cells)  # requests that wait, instances that live
        self._reconciled = [reach.num_connections] * len(cells)
        self._view: tuple[list[InstanceLoad], float] = ([], 0.0)
        self._offered: Counter[str] = Counter()  # since the view
        self._is_closed = False
        self._period_s = min(config.lease_s / 8, MAX_BEAT_S)
        self._link = FrontLink(options, self._on_deltas, self._on_started, self._on_unreachable)
        self._beat()
        self._thread = threading.Thread(target=self._run, name="fd-redis-front", daemon=True)
        self._thread.start()

    # -- what the front end calls -----------------------------------------------------------------

    def put(self, requests: Sequence[Request]) -> list[str | None]:
        """See RequestScheduler.put_requests."""
        with self._put_lock:
            self._flush()
            return [self._put(request) for request in requests]

    def get(self, timeout_s: float) -> list[Output]:
        """See RequestScheduler.get_results."""
        with self._lock:
            if not self._results and timeout_s > 0 and not self._is_closed:
                self._has_results.wait(timeout_s)
            results, self._results = self._results, []
            return results

    def abort(self, request_ids: Sequence[str]) -> None:
        """See RequestScheduler.abort."""
        with self._put_lock:
            for name in request_ids:
                self._abort(name)
            self._flush()

    def loads(self) -> list[InstanceLoad]:
        """Live instances; as last seen, while Redis is away."""
        if time.monotonic() - self._view[1] > self._period_s:
            self._look()
        seen, at = self._view
        age_s = time.monotonic() - at
        return [replace(load, age_s=load.age_s + age_s) for load in seen]

    def close(self) -> None:
        """Stop. What waits goes on waiting; its output has no reader any more."""
        if self._is_closed:
            return
        self._flush()
        with self._lock:
            self._is_closed = True
            for entry in list(self._entries.values()):
                entry.is_tracked, entry.instance = False, ""
                self._answer(entry, "the server is shutting down", "Aborted")
            self._has_results.notify_all()
        self._wanted.set()
        self._thread.join()
        self._link.close()
        for cell in self._cells:
            try:
                cell.front_leave(self.name)
            except redis.RedisError:
                break

    # -- putting ----------------------------------------------------------------------------------

    def _put(self, request: Request) -> str | None:
        if self._is_closed:
            return "unavailable: the server is shutting down"
        request_id = request.request_id
        if request_id in self._entries:
            return f"duplicate request id: {request_id!r:.80} is unfinished"
        self._num_put += 1
        cell = choose_cell(request, self._waiting)
        entry = Entry(request, cell, self._num_put)
        with self._lock:
            self._entries[request_id] = entry
        refusal = self._offer_or_refuse(entry) if self._reach.is_away else self._submit(entry)
        if refusal is not None:
            with self._lock:
                self._entries.pop(request_id, None)
        return refusal

    def _submit(self, entry: Entry, first_attempt: int = 0) -> str | None:
        request, config = entry.request, self._config
        wait_s = config.ttl_s
        if request.deadline_s is not None:
            wait_s = min(wait_s, request.deadline_s)
        wait_s = max(0.0, wait_s - (time.monotonic() - entry.put_s))
        limits = (config.max_size, config.max_tokens)
        entry.is_tracked = True  # its first delta may be here before the answer
        try:
            answer, number = self._cells[entry.cell].submit(
                self.name,
                entry.nonce,
                request,
                self._bodies.seal(request),
                wait_s,
                limits,
                first_attempt,
            )
        except redis.RedisError as error:
            logger.warning("%s does not answer: %s", self._options.server, error)
            # It may have been queued all the same.
            self._cancels.append((entry.cell, request.request_id))
            return self._offer_or_refuse(entry)
        if answer == "duplicate":
            return f"duplicate request id: {request.request_id!r:.80} is unfinished"
        if answer == "full":
            return (
                f"queue full: {number} requests wait, at most {config.max_size} may; "
                "try again later"
            )
        if answer == "full_tokens":
            return (
                f"queue full: with this one {number} prompt tokens would wait, at most "
                f"{config.max_tokens} may; try again later"
            )
        if answer == "cancelled":
            with self._lock:
                self._answer(entry, None, "")
        return None

    def _offer_or_refuse(self, entry: Entry) -> str | None:
        """Redis is away: an instance gets the request directly, by the newest view of them."""
        away_s = time.monotonic() - self._reach.last_answer_s
        if away_s > self._options.offline:
            logger.error("%s has not answered for %.0f s", self._options.server, away_s)
            return "unavailable: the request queue does not answer; try again later"
        limit = self._config.max_size
        with self._lock:
            num_direct = sum(e.is_direct and not e.position for e in self._entries.values())
        if limit and num_direct > limit:
            return f"queue full: {limit} requests wait while Redis is away; try again later"
        instance = self._least_loaded()
        if instance is None:
            logger.error("%s does not answer, no instance is connected", self._options.server)
            return "unavailable: the request queue does not answer; try again later"
        entry.is_direct, entry.is_tracked, entry.instance = True, False, instance
        self._offered[instance] += 1
        self._link.send(instance, Offer(entry.request))
        return None

    def _least_loaded(self) -> str | None:
        ages = self._link.ages()
        live = [name for name, age_s in ages.items() if age_s < self._config.lease_s]
        seen = {load.instance: load for load in self._view[0]}
        return choose_instance(live, seen, self._offered)

    def _on_unreachable(self, request: Request) -> None:
        with self._lock:
            entry = self._entries.get(request.request_id)
        if entry is None:
            return
        refusal = self._offer_or_refuse(entry)
        if refusal is not None:
            self._refuse(entry, refusal)

    # -- ending -----------------------------------------------------------------------------------

    def _abort(self, name: str) -> None:
        whole, branch = split_branch_id(name)
        with self._lock:
            entry = self._entries.get(whole)
            if entry is not None and branch is None:
                self._answer(entry, None, "")  # and a cancel is queued
        if branch is not None:
            self._end_branch(entry, whole, name)
        elif entry is None:
            self._cancels += [(number, name) for number in range(len(self._cells))]

    def _end_branch(self, entry: Entry | None, whole: str, name: str) -> None:
        if entry is None:
            return
        if entry.instance:
            self._link.send(entry.instance, Abort([name]))
            return
        try:
            owner = self._cells[entry.cell].cancel(self.name, whole, name)
        except redis.RedisError:
            return  # a branch that goes on costs time, no correctness
        if owner:
            self._link.send(owner, Abort([name]))

    def _refuse(self, entry: Entry, refusal: str) -> None:
        """End a request that had been accepted with what `put` would say of it now."""
        error = error_of(refusal)
        with self._lock:
            self._answer(entry, str(error), type(error).__name__)

    def _answer(self, entry: Entry, error: str | None, error_type: str) -> None:
        """The last delta of a request, made here instead of by an instance. Locked."""
        request = entry.request
        if self._entries.pop(request.request_id, None) is None:
            return
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        self._results.append(
            RequestOutputDelta(
                request_id=request.request_id,
                position=entry.position,
                attempt=max(entry.attempt, 0),
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
        self._has_results.notify_all()
        if entry.instance:
            self._link.send(entry.instance, Abort([request.request_id]))
        if entry.is_tracked:
            self._cancels.append((entry.cell, request.request_id))
            self._wanted.set()

    def _flush(self) -> None:
        """Tell Redis which requests have ended; what it does not hear now it hears later."""
        with self._put_lock:
            with self._lock:
                ends, self._ends = self._ends, []
                cancels, self._cancels = self._cancels, []
            try:
                while ends:
                    cell, request_id, attempt, how = ends[-1]
                    self._cells[cell].complete(request_id, attempt, how)
                    ends.pop()
                while cancels:
                    cell, request_id = cancels[-1]
                    owner = self._cells[cell].cancel(self.name, request_id)
                    if owner:
                        self._link.send(owner, Abort([request_id]))
                    cancels.pop()
            except redis.RedisError:
                with self._lock:
                    self._ends, self._cancels = ends + self._ends, cancels + self._cancels

    # -- output -----------------------------------------------------------------------------------

    def _on_deltas(self, instance: str, outputs: list[Output]) -> None:
        unwanted: list[str] = []
        with self._lock:
            for output in outputs:
                if isinstance(output, RequestOutputDelta):
                    self._show(instance, output, 1, unwanted)
                elif self._are_next(output):
                    now = time.monotonic()
                    for request_id in output.request_ids:
                        entry = self._entries[request_id]
                        entry.position += output.num_deltas
                        entry.heard_s = now
                    self._results.append(output)
                else:
                    for delta in output:
                        self._show(instance, delta, output.num_deltas, unwanted)
            if self._results:
                self._has_results.notify_all()
            if self._ends:
                self._wanted.set()
        if unwanted:
            self._link.send(instance, Abort(unwanted))

    def _on_started(self, request_id: str, attempt: int) -> None:
        with self._lock:
            self._notice(Notice("lost", request_id, attempt - 1))

    def _are_next(self, tokens: TokenDeltas) -> bool:
        """Whether every entry of these columns is what its request waits for."""
        entries = self._entries
        columns = zip(tokens.request_ids, tokens.attempts, tokens.positions, strict=True)
        for request_id, attempt, position in columns:
            entry = entries.get(request_id)
            if entry is None or entry.attempt != attempt or entry.position != position:
                return False
        return True

    def _show(
        self, instance: str, delta: RequestOutputDelta, num_deltas: int, unwanted: list[str]
    ) -> None:
        entry = self._entries.get(delta.request_id)
        if entry is None:
            if delta.finished:
                # An instance repeats the last delta until it knows that this side has it.
                for number in range(len(self._cells)):
                    self._ends.append((number, delta.request_id, delta.attempt, "finished"))
            else:
                unwanted.append(delta.request_id)
            return
        if delta.attempt != entry.attempt and not self._follows(entry, instance, delta, unwanted):
            return
        if delta.position < entry.position:
            return
        if delta.position > entry.position:
            lost = f"output of this request was lost between deltas {entry.position} and "
            self._answer(entry, f"{lost}{delta.position}", "FastDeployError")
            return
        entry.position += num_deltas
        entry.heard_s = time.monotonic()
        for sequence in delta.sequences:
            if sequence.finish_reason is not None:
                entry.finished_indices.add(sequence.index)
        self._results.append(delta)
        if delta.finished:
            del self._entries[delta.request_id]
            if entry.is_tracked:
                how = "failed" if delta.error is not None else "finished"
                self._ends.append((entry.cell, delta.request_id, delta.attempt, how))

    def _follows(
        self, entry: Entry, instance: str, delta: RequestOutputDelta, unwanted: list[str]
    ) -> bool:
        """Whether an attempt that was not seen before is the one to show."""
        if entry.is_direct and instance != entry.instance:
            unwanted.append(delta.request_id)  # Redis had queued it after all
            return False
        if delta.attempt < max(entry.floor, entry.attempt):
            return False
        if entry.position:
            self._answer(entry, _LOST, "WorkerError")
            return False
        entry.attempt, entry.instance = delta.attempt, instance
        return True

    # -- the thread that talks to Redis -----------------------------------------------------------

    def _run(self) -> None:
        next_s = time.monotonic() + self._period_s
        while not self._is_closed:
            self._wanted.wait(max(0.0, next_s - time.monotonic()))
            self._wanted.clear()
            try:
                if not self._reach.is_away:
                    self._flush()
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + self._period_s * _chance.uniform(0.8, 1.0)
                    self._beat()
                    self._look()
            except Exception:
                logger.exception("the front end's part of the request queue failed; it goes on")

    def _beat(self) -> None:
        for number, cell in enumerate(self._cells):
            try:
                beat = cell.front_beat(self.name, self._link.address, self._cursors[number])
                self._waiting[number] = beat.num_waiting, beat.num_instances
                cell.sweep()
                num_connections = self._reach.num_connections
                if beat.is_new or self._reconciled[number] != num_connections:
                    self._reconcile(number)
                    self._reconciled[number] = num_connections
            except redis.exceptions.ResponseError as error:
                logger.error("%s refused a call: %s", self._options.server, error)
                continue
            except redis.RedisError:
                break  # Reach knows
            with self._lock:
                for notice in beat.notices:
                    self._notice(notice)
            self._cursors[number] = beat.cursor
        self._end_silent()

    def _look(self) -> None:
        """Take a new view of the instances."""
        if self._reach.is_away:
            return
        found: list[InstanceLoad] = []
        try:
            for cell in self._cells:
                for report, age_s in cell.loads():
                    load = msgspec.msgpack.decode(report, type=InstanceLoad)
                    found.append(replace(load, age_s=age_s))
        except redis.RedisError:
            return
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            logger.warning("an unreadable load report was ignored: %s", error)
        self._view = found, time.monotonic()
        self._offered = Counter()

    def _notice(self, notice: Notice) -> None:
        entry = self._entries.get(notice.request_id)
        if entry is None or entry.is_direct or notice.attempt < max(entry.floor, entry.attempt):
            return
        if notice.what == "lost":
            if entry.position:
                # What was shown cannot be taken back, and another attempt may say something else.
                self._answer(entry, _LOST, "WorkerError")
            else:
                entry.floor, entry.attempt, entry.instance = notice.attempt + 1, -1, ""
            return
        entry.is_tracked = False
        if notice.what == "expired":
            waited_s = time.monotonic() - entry.put_s
            error = f"the request waited {waited_s:.1f} s, which is as long as it may"
            self._answer(entry, f"{error}; try again later", "RequestTimeout")
        elif notice.what == "dead":
            error = "every instance that ran this request died; it is not tried again"
            self._answer(entry, error, "WorkerError")
        else:
            self._answer(entry, None, "")

    def _reconcile(self, number: int) -> None:
        """Redis may be another one or lack its newest writes: queue again what it does not know."""
        with self._put_lock:  # so that none is on its way while Redis is asked
            with self._lock:
                mine = [e for e in self._entries.values() if e.cell == number and e.is_tracked]
            for start in range(0, len(mine), CHUNK):
                part = mine[start : start + CHUNK]
                ids = [entry.request.request_id for entry in part]
                known = self._cells[number].known(self.name, ids)
                for entry, is_known in zip(part, known, strict=True):
                    if not is_known:
                        self._queue_again(entry)

    def _queue_again(self, entry: Entry) -> None:
        with self._lock:
            if entry.position or entry.request.request_id not in self._entries:
                entry.is_tracked = False  # its instance goes on
                return
            entry.floor, entry.attempt = entry.floor + LOST_ATTEMPTS, -1
        self._num_put += 1
        entry.nonce = self._num_put
        refusal = self._submit(entry, entry.floor - 1)
        if refusal is not None:
            self._refuse(entry, refusal)

    def _end_silent(self) -> None:
        """Requests that Redis does not know end with their instance. If Redis took this front end
        for dead, the instance may have ended one without an answer: then nothing more comes."""
        ages, lease_s, now = self._link.ages(), self._config.lease_s, time.monotonic()
        with self._lock:
            for entry in list(self._entries.values()):
                if entry.is_tracked or not entry.instance:
                    continue
                is_silent = ages.get(entry.instance, float("inf")) > lease_s
                if is_silent or (not entry.is_direct and now - entry.heard_s > 2 * lease_s):
                    self._answer(entry, _LOST, "WorkerError")
