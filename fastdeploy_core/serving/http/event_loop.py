"""The event loop that API servers run on.

uvloop's, whose timers, sockets and queues are compiled: asyncio's own takes a tenth more of an API
server's time. It also sends what is written to a connection in one turn with one call, of some 20
us: the head of a stream and its first chunk, its last chunk and its end.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")

# New objects that the garbage collector waits for. Python's own 700 come with every sixth answer,
# and nearly all that it then looks at is still in use.
YOUNG_OBJECTS = 10_000


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run."""
    usual = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *usual[1:])
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*usual)
