"""Threads for work that would hold up the event loop: a bounded queue, fair to tenants."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastdeploy_core.memory.low_water import give_back_freed

from .errors import too_busy
from .event_loop import KEPT_BYTES, M_TRIM_THRESHOLD, mallopt

Result = TypeVar("Result")
# Allocators keep freed memory, for each thread apart: large bodies would stay with the process.
TRIM_AFTER_S = 1.0
TRIMMING = threading.Lock()  # the threshold is that of the whole process


class Threads:
    """Tenants take turns; what one of them piles up delays no other. Belongs to one event loop.
    rest: how long a thread is idle after a call, as a multiple of the time the call took."""

    def __init__(self, num_threads: int, max_waiting: int, name: str, rest: float = 0.0) -> None:
        self._executor = ThreadPoolExecutor(num_threads, name)
        self._rest = rest
        self._num_free = num_threads
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._name = name
        # by tenant, the one whose turn is next first
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._trim: asyncio.TimerHandle | None = None

    async def run(
        self, tenant: str, function: Callable[..., Result], *arguments: Any, **named: Any
    ) -> Result:
        """The function's result; 429 when too many calls wait."""
        loop = asyncio.get_running_loop()
        if self._num_free:
            self._num_free -= 1
        else:
            await self._turn(tenant, loop)
        done = self._executor.submit(partial(function, *arguments, **named))
        done.add_done_callback(partial(self._leave, loop, time.monotonic()))
        try:
            return await asyncio.wrap_future(done)
        finally:
            del done  # an error's traceback holds this frame, which must not hold the error

    async def _turn(self, tenant: str, loop: asyncio.AbstractEventLoop) -> None:
        if self._num_waiting >= self._max_waiting:
            raise too_busy(f"{self._num_waiting} calls wait for the {self._name} threads")
        turn = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._next()
            raise
        finally:
            self._num_waiting -= 1

    def _leave(self, loop: asyncio.AbstractEventLoop, began_s: float, _: Future[Any]) -> None:
        """Called by the thread: a caller that left keeps its place until the thread is free."""
        rest_s = self._rest * (time.monotonic() - began_s)
        if not loop.is_closed():
            loop.call_soon_threadsafe(loop.call_later, rest_s, self._next)

    def _next(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
        if self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._trim = None
        for _ in range(self._num_free):
            self._executor.submit(_give_back_own)

    def close(self) -> None:
        """Take no more work; what runs is not waited for."""
        if self._trim is not None:
            self._trim.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)


def _give_back_own() -> None:
    """What is free at the end of this thread's heap, which malloc_trim leaves, and between what is
    used of all heaps."""
    with TRIMMING:
        mallopt(M_TRIM_THRESHOLD, 0)
        bytes(96 * 1024)  # glibc looks at the end of a heap when it frees 64 KiB or more
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        give_back_freed()
        time.sleep(0.02)  # so that each of the idle threads takes a share
