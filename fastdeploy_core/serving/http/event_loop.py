"""The event loop that API servers run on: uvloop.

Its timers, sockets and queues are compiled; asyncio's own loop costs an API server a tenth more
time. uvloop also sends everything that is written to a connection within one turn with one system
call, of some 20 us: the head of a stream with its first chunk, its last chunk with its end.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")

# Allocations between two runs of the garbage collector. Python's default of 700 is reached with
# every sixth answer, and nearly all objects that a run would visit are still in use.
YOUNG_OBJECTS = 10_000
# How long a thread that parses or tokenizes may keep the interpreter from the event loop.
SWITCH_S = 0.0005
# Freed memory that glibc keeps: else each large body pays for its pages anew, as much as for its
# parse. `Threads` gives it back when they are idle.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 32 * 2**20
mallopt: Callable[[int, int], int] = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Like asyncio.run."""
    usual = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *usual[1:])
    sys.setswitchinterval(SWITCH_S)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*usual)
