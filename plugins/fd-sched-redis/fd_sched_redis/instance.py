"""An instance's side: takes requests, renews their lease, sends their output to front ends.

The step thread only touches lists here. Three threads of its own wait: one for work in Redis, one
for the time of the next report, one for the sockets.

A lease is proven by a clock of this process: it began before the call that renewed it. When it may
be over, output waits until Redis has said what is still held, so a process that was paused past its
lease shows nothing. While Redis is away nothing can be given to others, so output goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import redis

from fastdeploy_core.contracts.scheduler import Capacity, InstanceLoad, RequestSchedulerConfig
from fastdeploy_core.types import (
    Request,
    RequestOutputDelta,
    TokenDeltas,
    each_delta,
    split_branch_id,
)

from .bodies import Bodies
from .cell import Cell, Reach, Taken
from .link import Abort, Deltas, InstanceLink, Offer, Output, Started
from .options import CALL_TIMEOUT_S, Options
from .routing import home_cell

logger = logging.getLogger(__name__)

MAX_ASK_S = 1.0  # an engine that has not asked for so long is not given anything
WAIT_S = 0.5  # for work, before other cells are looked at
AWAY_S = 0.2  # between calls while Redis is away
CHUNK = 500  # requests of one question
_encode = msgspec.msgpack.Encoder().encode


class Held:
    """A request that this instance was given."""

    __slots__ = (
        "attempt",
        "cell",
        "ended_s",
        "front",
        "has_output",
        "last",
        "num_tokens",
        "waited_s",
    )

    def __init__(
        self, cell: int, attempt: int, front: str, num_tokens: int, waited_s: float
    ) -> None:
        self.cell = cell  # -1: a front end gave it directly
        self.attempt, self.front = attempt, front
        self.num_tokens, self.waited_s = num_tokens, waited_s
        self.has_output = False
        self.last: RequestOutputDelta | None = None  # sent; its front end has not confirmed it
        self.ended_s = 0.0


class InstanceSide:
    """Thread-safe. `_lock` is never held during a call of Redis."""

    def __init__(
        self, config: RequestSchedulerConfig, options: Options, cells: list[Cell], reach: Reach
    ) -> None:
        self._config, self._options, self._cells, self._reach = config, options, cells, reach
        self._bodies = Bodies(options)
        own = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.name = config.instance or own
        self._epoch = f"{config.epoch:x}" if config.epoch else secrets.token_hex(8)
        self._num_epochs = 0
        self._home = home_cell(self.name, len(cells))
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._held: dict[str, Held] = {}
        self._stash: deque[tuple[Request, Held]] = deque()
        self._aborts: list[str] = []
        self._told: set[str] = set()  # branches whose end was passed on
        self._ask: tuple[Capacity, float] | None = None  # what the engine has room for, until when
        self._num_asks = secrets.randbits(40)
        self._load = InstanceLoad(self.name, config.epoch)
        self._version = ["0"] * len(cells)
        self._fronts: list[dict[str, str]] = [{} for _ in cells]
        self._named: dict[str, tuple[str, float]] = {}  # front ends: address, when last named
        self.num_queued = 0  # in the queue of the home cell, as last heard
        self._is_alive = threading.Event()  # the engine was heard since the last beat
        self._until_s = 0.0  # the lease is proven until then
        self._beat_lock = threading.Lock()
        self._closing = threading.Event()
        self._link = InstanceLink(
            options, self.name, self._epoch, self._period_s, self._route, self._on_message
        )
        self._waiting = options.server.connect(WAIT_S + CALL_TIMEOUT_S)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._feed, "fd-redis-take"), (self._renew, "fd-redis-lease"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def _period_s(self) -> float:
        """Between two reports."""
        period_s = self._config.lease_s / 8
        if self._cells[0].is_push:
            period_s = min(period_s, self._options.sync_period / 1000)
        return period_s

    # -- what the engine calls --------------------------------------------------------------------

    def get_requests(self, capacity: Capacity, timeout_s: float) -> list[Request]:
        """See RequestScheduler.get_requests."""
        deadline = time.monotonic() + timeout_s
        self._is_alive.set()
        with self._lock:
            while True:
                taken = self._from_stash(capacity)
                now = time.monotonic()
                has_room = capacity.num_requests > 0 and not self._stash
                lapse_s = min(MAX_ASK_S, self._config.lease_s / 4)
                self._ask = None if taken or not has_room else (capacity, now + lapse_s)
                self._changed.notify_all()
                if taken or now >= deadline or self._closing.is_set() or self._aborts:
                    return taken
                self._changed.wait(min(deadline - now, lapse_s / 2))

    def put_results(self, outputs: Sequence[Output]) -> None:
        """See RequestScheduler.put_results."""
        self._is_alive.set()
        self._link.put(list(outputs))

    def get_aborts(self) -> list[str]:
        """See RequestScheduler.get_aborts."""
        if not self._aborts:
            return []
        with self._lock:
            aborts, self._aborts = self._aborts, []
            return aborts

    def report_load(self, load: InstanceLoad) -> None:
        """See RequestScheduler.report_load."""
        is_first = not self._load.num_total_blocks and not self._is_alive.is_set()
        self._load = load
        self._is_alive.set()
        if is_first:
            self._beat()

    def wake(self) -> None:
        """End a wait in get_requests."""
        with self._lock:
            self._changed.notify_all()

    def close(self) -> None:
        """Send what is left, give everything back, stop."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            self._changed.notify_all()
        self._link.close()
        self._is_alive.set()
        if not self._reach.is_away:
            with contextlib.suppress(redis.RedisError):
                self._cells[self._home].wake(self.name)
        for thread in self._threads:
            thread.join()
        for number in self._my_cells():
            with contextlib.suppress(redis.RedisError):
                self._cells[number].leave(self.name, self._epoch_name)
        self._waiting.close()

    # -- requests ---------------------------------------------------------------------------------

    def _from_stash(self, capacity: Capacity) -> list[Request]:
        num_blocks, num_tokens = capacity.num_free_blocks, capacity.num_tokens
        total = self._load.num_total_blocks
        taken: list[Request] = []
        while self._stash and len(taken) < capacity.num_requests:
            request, held = self._stash[0]
            if self._held.get(request.request_id) is not held:
                self._stash.popleft()  # cancelled or lost in the meantime
                continue
            if request.request_id in self._aborts:
                break  # the engine still runs an aborted request of this id
            need = held.num_tokens // capacity.block_size + 1
            can_run = not total or need <= total
            num_tokens -= held.num_tokens
            if num_tokens < 0 or (can_run and need > num_blocks):
                break
            num_blocks -= need if can_run else 0
            taken.append(self._stash.popleft()[0])
        return taken

    def _feed(self) -> None:
        """The thread that takes requests for an engine that has room."""
        while not self._closing.is_set():
            try:
                if self._load.draining:
                    self._give_back()
                with self._lock:
                    if self._room() is None:
                        self._changed.wait(WAIT_S)
                    capacity = self._room()
                if capacity is not None and not self._take_from_any(capacity):
                    home = self._cells[self._home]
                    wait_s = min(WAIT_S, self._config.lease_s / 8)
                    home.wait_for_work(self._waiting, self.name, wait_s, self._has_room)
            except redis.exceptions.ResponseError as error:
                logger.error("%s refused a call: %s", self._options.server, error)
                time.sleep(AWAY_S)
            except redis.RedisError:
                time.sleep(AWAY_S)
            except Exception:
                logger.exception("requests could not be taken; it is tried again")
                time.sleep(AWAY_S)

    def _give_back(self) -> None:
        """An engine that drains asks no more: others get what it would have been given next."""
        with self._lock:
            spare = [entry for entry in self._stash if entry[1].cell >= 0]
            self._stash = deque(entry for entry in self._stash if entry[1].cell < 0)
        for number in {held.cell for _, held in spare}:
            part = [(r.request_id, held) for r, held in spare if held.cell == number]
            try:
                self._cells[number].give_back(self.name, [(name, h.attempt) for name, h in part])
            except redis.RedisError:
                with self._lock:
                    self._stash.extend(entry for entry in spare if entry[1].cell == number)
                raise
            with self._lock:
                for name, held in part:
                    if self._held.get(name) is held:
                        del self._held[name]

    def _room(self) -> Capacity | None:
        ask = self._ask
        return ask[0] if ask is not None and time.monotonic() < ask[1] else None

    def _has_room(self) -> bool:
        return self._room() is not None and not self._closing.is_set()

    def _take_from_any(self, capacity: Capacity) -> bool:
        """Take from the home cell, else steal from another one."""
        count = len(self._cells)
        cells = ((self._home + step) % count for step in range(count))
        return any(self._take(number, capacity) for number in cells)

    def _take(self, number: int, capacity: Capacity) -> bool:
        began_s = time.monotonic()
        status, taken = self._cells[number].take(
            self.name,
            self._epoch_name,
            self._num_asks,
            capacity,
            self._load.num_total_blocks,
            self._options.min_load_score,
            number != self._home,
        )
        if not self._is_entered(status, number):
            return False
        self._num_asks += 1
        if number == self._home:
            self._until_s = max(self._until_s, began_s + self._config.lease_s)
        with self._lock:
            for one in taken:
                if one.address:
                    self._named[one.front] = one.address, began_s
                    self._link.add(one.front, one.address)
                self._accept(number, one)
            if self._stash:
                self._ask = None
                self._changed.notify_all()
        return bool(taken)

    def _accept(self, number: int, taken: Taken) -> None:
        request_id = taken.request_id
        before = self._held.get(request_id)
        if before is not None:
            if before.cell < 0:
                return  # its front end gave it directly, and will take it back from Redis
            if before.last is None:
                self._aborts.append(request_id)
        try:
            request = self._bodies.open(request_id, taken.body)
        except ValueError as error:
            logger.error("request %r cannot be read and is not run: %s", request_id, error)
            self._held[request_id] = Held(number, taken.attempt, taken.front, 0, 0.0)
            self._link.put(
                [
                    RequestOutputDelta(
                        request_id=request_id,
                        attempt=taken.attempt,
                        finished=True,
                        error="this request could not be read by the instance that got it",
                        error_type="FastDeployError",
                    )
                ]
            )
            return
        request.attempt, request.instance = taken.attempt, ""
        if request.deadline_s is not None:
            request.deadline_s = max(0.0, request.deadline_s - taken.waited_s)
        size = len(request.prompt_token_ids)
        held = Held(number, taken.attempt, taken.front, size, taken.waited_s)
        if taken.attempt > 1:
            self._link.say(taken.front, Started(request_id, taken.attempt))
        self._held[request_id] = held
        self._stash.append((request, held))

    def _on_message(self, front: str, message: Abort | Offer) -> None:
        with self._lock:
            if isinstance(message, Abort):
                for name in message.request_ids:
                    self._abort(name)
            elif message.request.request_id not in self._held:
                request = message.request
                request.attempt = 0
                held = Held(-1, 0, front, len(request.prompt_token_ids), 0.0)
                self._held[request.request_id] = held
                self._stash.append((request, held))
            self._changed.notify_all()

    def _abort(self, name: str) -> None:
        """A request or branch is no longer wanted. Locked."""
        whole, branch = split_branch_id(name)
        held = self._held.get(whole)
        if held is None or held.last is not None:
            return
        if branch is not None:
            if name not in self._told:
                self._told.add(name)
                self._aborts.append(name)
            return
        del self._held[whole]
        if not any(mine is held for _, mine in self._stash):
            self._aborts.append(whole)

    # -- output -----------------------------------------------------------------------------------

    def _route(self, outputs: list[Output]) -> Iterable[tuple[str, list[Output]]]:
        """What of this output goes to which front end. In the sockets' thread."""
        if time.monotonic() > self._until_s:
            self._beat()
        parts: dict[str, list[Output]] = {}
        with self._lock:
            for output in outputs:
                if isinstance(output, TokenDeltas):
                    front = self._common_front(output)
                    if front is not None:
                        parts.setdefault(front, []).append(output)
                        continue
                    for delta in each_delta([output]):
                        self._route_one(delta, parts)
                else:
                    self._route_one(output, parts)
        return parts.items()

    def _common_front(self, tokens: TokenDeltas) -> str | None:
        """The front end of all entries; None if they have several, or if one is not held."""
        found: str | None = None
        for request_id, attempt in zip(tokens.request_ids, tokens.attempts, strict=True):
            held = self._held.get(request_id)
            if held is None or held.attempt != attempt or held.last is not None:
                return None
            if held.front != found:
                if found is not None:
                    return None
                found = held.front
        return found

    def _route_one(self, delta: RequestOutputDelta, parts: dict[str, list[Output]]) -> None:
        held = self._held.get(delta.request_id)
        if held is None or held.attempt != delta.attempt or held.last is not None:
            return
        held.has_output = True
        if delta.position == 0 and delta.queue_s is not None:
            delta.queue_s += held.waited_s
        if delta.finished:
            held.last, held.ended_s = delta, time.monotonic()
            self._told = {name for name in self._told if split_branch_id(name)[0] in self._held}
        parts.setdefault(held.front, []).append(delta)
        if delta.finished and held.cell < 0:
            del self._held[delta.request_id]

    # -- leases -----------------------------------------------------------------------------------

    def _renew(self) -> None:
        """The thread that reports while the engine is heard."""
        while not self._closing.is_set():
            self._closing.wait(min(self._period_s, WAIT_S))
            try:
                if self._is_alive.is_set():
                    self._beat()
                    self._cells[self._home].sweep()
                    self._settle(min(0.25, self._config.lease_s / 8))
            except redis.RedisError:
                pass  # Reach knows
            except Exception:
                logger.exception("a lease could not be renewed; it is tried again")

    @property
    def _epoch_name(self) -> str:
        return f"{self._epoch}.{self._num_epochs}"

    def _my_cells(self) -> list[int]:
        """The home cell, and others of which something is held."""
        with self._lock:
            others = {held.cell for held in self._held.values()} - {-1, self._home}
        return [self._home, *sorted(others)]

    def _beat(self) -> None:
        """Report to every cell of which something is held; redis.RedisError is noted only."""
        with self._beat_lock:
            self._is_alive.clear()
            began_s = time.monotonic()
            try:
                answers = [self._beat_one(number) for number in self._my_cells()]
                if all(answers):
                    self._until_s = max(self._until_s, began_s + self._config.lease_s)
            except redis.exceptions.ResponseError as error:
                logger.error("%s refused a call: %s", self._options.server, error)
            except redis.RedisError:
                self._is_alive.set()  # try again soon

    def _beat_one(self, number: int) -> bool:
        with self._lock:
            running = [h for h in self._held.values() if h.last is None]
            num_tokens = sum(h.num_tokens for h in running if not h.has_output)
        load = self._load
        beat = self._cells[number].beat(
            self.name,
            self._epoch_name,
            (str(load.role), num_tokens, len(running), _encode(load)),
            self._version[number],
            number != self._home,
            load.draining,
        )
        if not self._is_entered(beat.status, number):
            return False
        if number == self._home:
            self.num_queued = beat.num_waiting
        self._version[number] = beat.version
        if beat.fronts is not None:
            self._fronts[number] = beat.fronts
            self._know_fronts()
        if beat.aborts:
            with self._lock:
                for name, attempt in beat.aborts:
                    held = self._held.get(split_branch_id(name)[0])
                    if held is not None and held.attempt <= attempt:
                        self._abort(name)
                self._changed.notify_all()
        return True

    def _know_fronts(self) -> None:
        """Keep sockets to front ends that Redis names, or named until a moment ago: it forgets
        those that were paused, and all when it is started anew."""
        now = time.monotonic()
        named = {name: address for fronts in self._fronts for name, address in fronts.items()}
        with self._lock:
            reading = {held.front for held in self._held.values()}
            self._named.update({name: (address, now) for name, address in named.items()})
            self._named = {
                name: (address, seen_s)
                for name, (address, seen_s) in self._named.items()
                if name in reading or now - seen_s < 2 * self._config.lease_s
            }
            self._link.know({name: address for name, (address, _) in self._named.items()})

    def _is_entered(self, status: str, number: int) -> bool:
        """Whether this epoch has a lease. If it has lost an earlier one, what others have is
        dropped."""
        if status == "ok":
            return True
        self._drop_lost(number)
        if status == "fenced":
            self._num_epochs += 1  # the lease was lost, and nobody else has the name
            return False
        if status == "replaced":
            logger.error(
                "another engine has the name %r; this one gets no requests. Give each engine a "
                "--scheduler-instance of its own",
                self.name,
            )
            return False
        return True

    def _drop_lost(self, number: int) -> None:
        with self._lock:
            mine = [(name, h) for name, h in self._held.items() if h.cell == number]
        for start in range(0, len(mine), CHUNK):
            part = mine[start : start + CHUNK]
            answers = self._cells[number].held(self.name, [(n, h.attempt) for n, h in part])
            with self._lock:
                for (name, held), answer in zip(part, answers, strict=True):
                    # 3: Redis has forgotten it. Its front end has not, and wants the answer.
                    if answer == 0 and self._held.get(name) is held:
                        self._abort(name)
                        self._held.pop(name, None)
                self._changed.notify_all()

    def _settle(self, min_age_s: float) -> None:
        """Ask what became of ended requests whose front ends had time to confirm them: those of
        dead front ends are ended here, other last deltas are sent again."""
        now = time.monotonic()
        with self._lock:
            mine = [
                (name, held)
                for name, held in self._held.items()
                if held.last is not None and now - held.ended_s >= min_age_s
            ]
        again: dict[str, list[Output]] = {}
        for number in {held.cell for _, held in mine}:
            part = [(name, held) for name, held in mine if held.cell == number][:CHUNK]
            cell = self._cells[number]
            try:
                answers = cell.held(self.name, [(n, h.attempt) for n, h in part])
                for (name, held), answer in zip(part, answers, strict=True):
                    if answer == 1 and held.last is not None and now - held.ended_s > min_age_s:
                        again.setdefault(held.front, []).append(held.last)
                        continue
                    if answer == 2 and now - held.ended_s < self._config.lease_s:
                        continue  # it may only have been paused
                    if answer == 2:
                        cell.complete(name, held.attempt, "unread")
                    with self._lock:
                        if self._held.get(name) is held:
                            del self._held[name]
            except redis.RedisError:
                return
        for front, outputs in again.items():
            self._link.say(front, Deltas(outputs))
