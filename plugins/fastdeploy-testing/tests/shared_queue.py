"""A request scheduler whose objects share one queue and grant leases, in a test's memory; a driver
over a server would look like it. It keeps the contract, so it tests the conformance kit's own tests
of leases and of shared queues."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import msgspec

from fastdeploy_core.config import RequestSchedulerConfig
from fastdeploy_core.contracts.scheduler import Capacity, InstanceLoad, SchedulerCapabilities
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.types import (
    Request,
    RequestOutputDelta,
    TokenDeltas,
    each_delta,
    split_branch_id,
)


class Task:
    """An unfinished request."""

    def __init__(self, request: Request, front: SharedQueue, now: float) -> None:
        self.request, self.front, self.queued_s = request, front, now
        self.attempt, self.position = request.attempt, 0
        self.owner: SharedQueue | None = None
        self.lease_until_s = 0.0


class Topic:
    """What all objects of one queue share."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.tasks: dict[str, Task] = {}
        self.early_aborts: set[str] = set()
        self.loads: dict[str, tuple[InstanceLoad, float]] = {}


class SharedQueue:
    """RequestScheduler."""

    name = "shared"
    contract = (1, 0)
    capabilities = SchedulerCapabilities(shared_queue=True, leases=True, durable=True)
    topics: ClassVar[dict[str, Topic]] = {}

    def __init__(self, config: RequestSchedulerConfig) -> None:
        self._config = config
        options = dict(config.options or {})
        name = str(options.pop("topic", ""))
        if options:
            raise ConfigError(f"request scheduler 'shared' does not know {', '.join(options)}")
        self.topic = self.topics.setdefault(name, Topic()) if name else Topic()
        self._results: list[RequestOutputDelta | TokenDeltas] = []
        self._aborts: list[str] = []
        self.is_closed = False

    def put_requests(self, requests: Sequence[Request]) -> list[str | None]:
        with self.topic.changed:
            return [self._put(request) for request in requests]

    def _put(self, request: Request) -> str | None:
        topic, limit = self.topic, self._config.max_size
        before = topic.tasks.get(request.request_id)
        if before is not None and not before.front.is_closed:
            return "duplicate request id"
        if limit and sum(task.owner is None for task in topic.tasks.values()) >= limit:
            return "queue full: try again later"
        task = Task(request, self, time.monotonic())
        if before is not None:  # nobody waits for it any more
            task.attempt = before.attempt
            self.abort([request.request_id])
        topic.tasks[request.request_id] = task
        if request.request_id in topic.early_aborts:
            topic.early_aborts.remove(request.request_id)
            self._answer(task, None, "")
        topic.changed.notify_all()
        return None

    def get_requests(self, capacity: Capacity, timeout_s: float = 0.0) -> list[Request]:
        with self.topic.changed:
            self._replace_earlier_epochs()
            taken = self._take(capacity)
            if not taken and timeout_s:
                self.topic.changed.wait(timeout_s)
                taken = self._take(capacity)
            return taken

    def _take(self, capacity: Capacity) -> list[Request]:
        self._sweep()
        now, num_blocks = time.monotonic(), capacity.num_free_blocks
        waiting = [task for task in self.topic.tasks.values() if task.owner is None]
        waiting.sort(key=lambda task: task.request.priority)
        taken: list[Request] = []
        for task in waiting[: capacity.num_requests]:
            num_blocks -= len(task.request.prompt_token_ids) // capacity.block_size + 1
            if num_blocks < 0:
                break
            task.owner, task.lease_until_s = self, now + self._config.lease_s
            task.attempt += 1
            taken.append(msgspec.structs.replace(task.request, attempt=task.attempt))
        return taken

    def _replace_earlier_epochs(self) -> None:
        mine = self._config
        for task in self.topic.tasks.values():
            if task.owner is not None and task.owner is not self:
                owner = task.owner._config
                if mine.instance and owner.instance == mine.instance:
                    task.lease_until_s = 0.0

    def _sweep(self) -> None:
        now = time.monotonic()
        for task in list(self.topic.tasks.values()):
            if task.owner is None and now - task.queued_s > self._config.ttl_s:
                self._answer(task, "waited too long", "RequestTimeout")
            elif task.owner is not None and task.lease_until_s <= now:
                task.owner = None
                if task.position:
                    self._answer(task, "the engine was lost", "WorkerError")

    def put_results(self, outputs: Sequence[RequestOutputDelta | TokenDeltas]) -> None:
        with self.topic.changed:
            self._sweep()
            for delta in each_delta(outputs):
                task = self.topic.tasks.get(delta.request_id)
                is_stale = task is None or task.owner is None or delta.attempt != task.attempt
                if task is None or is_stale or delta.position != task.position:
                    continue
                task.position += 1
                task.lease_until_s = time.monotonic() + self._config.lease_s
                task.front._results.append(delta)
                if delta.finished:
                    del self.topic.tasks[delta.request_id]
            self.topic.changed.notify_all()

    def get_results(self, timeout_s: float = 0.0) -> list[RequestOutputDelta | TokenDeltas]:
        with self.topic.changed:
            self._sweep()
            if not self._results and timeout_s:
                self.topic.changed.wait(timeout_s)
            results, self._results = self._results, []
            return results

    def _answer(self, task: Task, error: str | None, error_type: str) -> None:
        last = RequestOutputDelta(
            request_id=task.request.request_id,
            position=task.position,
            attempt=task.attempt,
            sequences=[],
            finished=True,
            error=error,
            error_type=error_type,
        )
        task.front._results.append(last)
        del self.topic.tasks[task.request.request_id]

    def abort(self, request_ids: Sequence[str]) -> None:
        with self.topic.changed:
            for name in request_ids:
                whole, branch = split_branch_id(name)
                task = self.topic.tasks.get(whole)
                if task is not None and task.owner is not None:
                    task.owner._aborts.append(name)
                if branch is None and task is not None:
                    self._answer(task, None, "")
                elif branch is None:
                    self.topic.early_aborts.add(name)

    def get_aborts(self) -> list[str]:
        with self.topic.changed:
            aborts, self._aborts = self._aborts, []
            return aborts

    def report_load(self, load: InstanceLoad) -> None:
        with self.topic.changed:
            self.topic.loads[load.instance] = load, time.monotonic()
            for task in self.topic.tasks.values():
                if task.owner is self:
                    task.lease_until_s = time.monotonic() + self._config.lease_s

    def loads(self) -> list[InstanceLoad]:
        with self.topic.changed:
            now = time.monotonic()
            return [replace(load, age_s=now - then) for load, then in self.topic.loads.values()]

    def close(self) -> None:
        with self.topic.changed:
            self.is_closed = True
            for task in self.topic.tasks.values():
                if task.owner is self:
                    task.owner = None
            self.topic.changed.notify_all()
