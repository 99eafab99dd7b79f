"""One cell of the shared queue: each method is one call of queue.lua."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import chain
from typing import Any, NamedTuple

import redis

from fastdeploy_core.contracts.scheduler import Capacity
from fastdeploy_core.types import Request

_SCRIPT = files(__package__).joinpath("queue.lua").read_text()


class Taken(NamedTuple):
    """A request that an instance was given."""

    request_id: str
    attempt: int
    waited_s: float
    front: str
    address: str  # of the front end; empty: it has died
    body: bytes


class Beat(NamedTuple):
    """What an instance hears when it reports. `status`: see `enter` in queue.lua."""

    status: str
    num_waiting: int = 0
    aborts: tuple[tuple[str, int], ...] = ()  # request or branch, and the attempt to stop
    version: str = "0"  # of the list of front ends
    fronts: dict[str, str] | None = None  # their addresses; None: as before


class Notice(NamedTuple):
    """What happened to a front end's request: lost, dead, expired or cancelled."""

    what: str
    request_id: str
    attempt: int


class FrontBeat(NamedTuple):
    """What a front end hears when it reports."""

    is_new: bool
    num_waiting: int
    num_instances: int
    notices: list[Notice]
    cursor: str


class Reach:
    """Whether Redis answers; shared by all calls of one object. Thread-safe without a lock: every
    value is written whole."""

    def __init__(self) -> None:
        self.last_answer_s = 0.0
        self.since_s = time.monotonic()  # it has answered every call since then
        self.is_away = False
        self.num_connections = 0

    def connected(self) -> None:
        """A connection was opened: perhaps to a server that was started again, or to another."""
        self.num_connections += 1

    def note(self, is_answer: bool) -> None:
        """A call was answered, or not."""
        now = time.monotonic()
        if is_answer:
            if self.is_away:
                self.since_s = now
            self.last_answer_s = now
        self.is_away = not is_answer


class Cell:
    """Any thread may call. redis.RedisError: the call may or may not have had its effect; every
    operation can be repeated."""

    def __init__(
        self,
        client: redis.Redis,
        prefix: str,
        lease_s: float,
        max_attempts: int,
        is_push: bool,
        reach: Reach,
    ) -> None:
        self.prefix = prefix
        self.reach = reach
        self.lease_s = lease_s
        self._script = client.register_script(_SCRIPT)
        self._client = client
        self._common = (round(lease_s * 1000), max_attempts)
        self.is_push = is_push  # front ends choose the instance; else instances take

    def _call(self, operation: str, *arguments: Any) -> Any:
        seed = random.getrandbits(31)
        args = [operation, *self._common, seed, "push" if self.is_push else "pull", *arguments]
        try:
            answer = self._script(keys=[self.prefix], args=args)
        except redis.exceptions.ResponseError:
            self.reach.note(True)
            raise
        except redis.RedisError:
            self.reach.note(False)
            raise
        self.reach.note(True)
        return answer

    # -- front ends -------------------------------------------------------------------------------

    def submit(
        self,
        front: str,
        nonce: int,
        request: Request,
        body: bytes,
        wait_s: float,
        limits: tuple[int, int],
        attempt: int,
    ) -> tuple[str, int]:
        """Queue a request: ok, duplicate, full, full_tokens or cancelled, and a number to it.
        `attempt`: the newest that this front end knows of; limits: of requests, of tokens."""
        answer = self._call(
            "submit",
            front,
            request.request_id,
            nonce,
            len(request.prompt_token_ids),
            request.priority,
            request.tenant,
            max(1, round(wait_s * 1000)),
            *limits,
            attempt,
            body,
        )
        return answer[0].decode(), int(answer[1]) if len(answer) > 1 else 0

    def cancel(self, front: str, request_id: str, branch: str = "") -> str:
        """End a request, or pass the end of a branch on; returns the instance that has it."""
        return _text(self._call("cancel", front, request_id, branch)[0])

    def complete(self, request_id: str, attempt: int, how: str) -> str:
        """End a request whose last delta was received: ok, gone or stale."""
        return _text(self._call("complete", request_id, attempt, how)[0])

    def known(self, front: str, request_ids: Sequence[str]) -> list[bool]:
        """Which of a front end's requests the queue still knows."""
        return [bool(x) for x in self._call("known", front, *request_ids)]

    def front_beat(self, front: str, address: str, cursor: str) -> FrontBeat:
        """Renew a front end's lease. cursor: that of the last answer, first "0-0"."""
        is_new, num_waiting, num_instances, entries = self._call(
            "front_beat", front, address, cursor
        )
        notices = []
        for number, pairs in entries:
            cursor = _text(number)
            told = {_text(a): _text(b) for a, b in zip(pairs[::2], pairs[1::2], strict=True)}
            notices.append(Notice(told["what"], told["id"], int(told["attempt"])))
        return FrontBeat(bool(is_new), num_waiting, num_instances, notices, cursor)

    def front_leave(self, front: str) -> None:
        """A front end ends."""
        self._call("front_leave", front)

    # -- instances --------------------------------------------------------------------------------

    def take(
        self,
        instance: str,
        epoch: str,
        ask: int,
        capacity: Capacity,
        total_blocks: int,
        min_waiting: int,
        is_foreign: bool,
    ) -> tuple[str, list[Taken]]:
        """Take what fits. `ask` numbers the question: asked again, it has the same answer."""
        answer = self._call(
            "take",
            instance,
            epoch,
            ask,
            capacity.num_requests,
            capacity.num_free_blocks,
            capacity.block_size,
            capacity.num_tokens,
            total_blocks,
            min_waiting,
            int(is_foreign),
        )
        taken = answer[1] if len(answer) > 1 else []
        return _text(answer[0]), [
            Taken(_text(a), int(b), int(c) / 1000, _text(d), _text(e), f)
            for a, b, c, d, e, f in taken
        ]

    def wait_for_work(
        self, client: redis.Redis, instance: str, timeout_s: float, is_wanted: Callable[[], bool]
    ) -> None:
        """Wait until something may have come for this instance. A wake-up that is no longer wanted
        goes to another one."""
        lists = [f"{self.prefix}wake:{instance}", f"{self.prefix}wake"]
        found: Any = client.blpop(lists, timeout_s)
        if found is not None and _text(found[0]) == lists[1] and not is_wanted():
            client.rpush(lists[1], b"1")

    def wake(self, instance: str) -> None:
        """End its wait for work."""
        self._client.rpush(f"{self.prefix}wake:{instance}", b"1")

    def beat(
        self,
        instance: str,
        epoch: str,
        load: tuple[str, int, int, bytes],
        version: str,
        is_foreign: bool,
        is_draining: bool,
    ) -> Beat:
        """Renew an instance's lease. load: role, prompt tokens before it, requests, report."""
        answer = self._call(
            "beat", instance, epoch, int(is_foreign), int(is_draining), *load, version
        )
        status = _text(answer[0])
        if len(answer) == 1:
            return Beat(status)
        _, num_waiting, aborts, newest, pairs = answer
        newest = _text(newest)
        names = [_text(x) for x in pairs]
        fronts = dict(zip(names[::2], names[1::2], strict=True)) if newest != version else None
        return Beat(status, num_waiting, tuple(map(_abort, aborts)), newest, fronts)

    def held(self, instance: str, attempts: Sequence[tuple[str, int]]) -> list[int]:
        """What is true of requests that an instance believes to hold: see queue.lua."""
        return [int(x) for x in self._call("held", instance, *chain.from_iterable(attempts))]

    def give_back(self, instance: str, attempts: Sequence[tuple[str, int]]) -> None:
        """An instance will not begin these requests."""
        self._call("give_back", instance, *chain.from_iterable(attempts))

    def leave(self, instance: str, epoch: str) -> None:
        """An instance ends and gives back what it holds."""
        self._call("leave", instance, epoch)

    # -- both -------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Do the queue's housekeeping. Leases count only for who has seen Redis answer for as long
        as one lasts: after an outage all of them are over, and their owners come first."""
        may_reap = time.monotonic() - self.reach.since_s >= self.lease_s
        self._call("sweep", int(may_reap))

    def loads(self) -> list[tuple[bytes, float]]:
        """Reports of live instances, each with its age in seconds."""
        return [(report, age_ms / 1000) for report, age_ms in self._call("loads")]

    def counters(self) -> dict[str, int]:
        """What the cell has counted since it was made: submitted, and how requests ended:
        finished, failed, cancelled, expired, dead, taken_over, unread; and what waits."""
        raw: Any = self._client.hgetall(f"{self.prefix}n")
        found = {_text(k): int(float(v)) for k, v in raw.items()}
        found["waiting"] = int(self._client.zcard(f"{self.prefix}wait"))
        return found


def _abort(entry: bytes) -> tuple[str, int]:
    attempt, _, name = entry.decode().partition(":")
    return name, int(attempt)


def _text(value: bytes) -> str:
    return value.decode()
