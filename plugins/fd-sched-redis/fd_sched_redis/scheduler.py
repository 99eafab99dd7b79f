"""The drivers `global` and `splitwise`: one object is a front end's, an instance's, or both."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import redis

from fastdeploy_core.contracts.scheduler import (
    Capacity,
    InstanceLoad,
    RequestSchedulerConfig,
    SchedulerCapabilities,
)
from fastdeploy_core.types import Request, RequestOutputDelta, TokenDeltas

from .cell import Cell, Reach
from .front import FrontSide
from .instance import InstanceSide
from .options import read_options


class _RedisScheduler:
    """RequestScheduler. Each side starts with the first call that needs it."""

    contract = (1, 0)
    capabilities = SchedulerCapabilities(shared_queue=True, leases=True, durable=True)
    is_push = False

    def __init__(self, config: RequestSchedulerConfig) -> None:
        self._config = config
        self._options = options = read_options(config.options)
        self._reach = Reach()
        self._client: redis.Redis = options.server.connect(on_connect=self._reach.connected)
        self.cells = [
            Cell(
                self._client,
                options.cell(number),
                config.lease_s,
                options.max_attempts,
                self.is_push,
                self._reach,
            )
            for number in range(options.load_shards_num)
        ]
        self._lock = threading.Lock()
        self._front: FrontSide | None = None
        self._instance: InstanceSide | None = None

    def _as_front(self) -> FrontSide:
        with self._lock:
            if self._front is None:
                self._front = FrontSide(self._config, self._options, self.cells, self._reach)
            return self._front

    def _as_instance(self) -> InstanceSide:
        with self._lock:
            if self._instance is None:
                self._instance = InstanceSide(self._config, self._options, self.cells, self._reach)
            return self._instance

    @property
    def num_queued(self) -> int:
        """Requests that wait in this instance's cell, as it heard last."""
        return 0 if self._instance is None else self._instance.num_queued

    def put_requests(self, requests: Sequence[Request]) -> list[str | None]:
        """Queue requests; one entry each: None, or why it was refused."""
        return self._as_front().put(requests)

    def get_requests(self, capacity: Capacity, timeout_s: float = 0.0) -> list[Request]:
        """Take at most what fits, in turn of priority, tenant and arrival."""
        return self._as_instance().get_requests(capacity, timeout_s)

    def put_results(self, outputs: Sequence[RequestOutputDelta | TokenDeltas]) -> None:
        """Send deltas to the front ends that put their requests."""
        self._as_instance().put_results(outputs)

    def get_results(self, timeout_s: float = 0.0) -> list[RequestOutputDelta | TokenDeltas]:
        """What is new for the clients of this front end."""
        return self._as_front().get(timeout_s)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Cancel wherever the request is. Without ids it only wakes an idle engine."""
        if request_ids:
            self._as_front().abort(request_ids)
        elif self._instance is not None:
            self._instance.wake()

    def get_aborts(self) -> list[str]:
        """Requests that this engine must stop."""
        return self._as_instance().get_aborts()

    def report_load(self, load: InstanceLoad) -> None:
        """Renew the instance's lease."""
        self._as_instance().report_load(load)

    def loads(self) -> list[InstanceLoad]:
        """Live instances."""
        return self._as_front().loads()

    def close(self) -> None:
        """Give back what is held; stop."""
        if self._instance is not None:
            self._instance.close()
        if self._front is not None:
            self._front.close()
        self._client.close()


class GlobalScheduler(_RedisScheduler):
    """Pull: instances take what they have room for, from other cells when their own is empty."""

    name = "global"


class SplitwiseScheduler(_RedisScheduler):
    """Push: each request is given to one of the instances with little load."""

    name = "splitwise"
    is_push = True
