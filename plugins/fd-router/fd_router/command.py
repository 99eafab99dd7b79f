"""`fastdeploy router`."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence

import uvloop

from .options import parse

# Allocations between two runs of the garbage collector: Python's default is one for every few
# requests, and nearly all objects that a run visits are still in use.
YOUNG_OBJECTS = 10_000


def main(arguments: Sequence[str]) -> int:
    """`fastdeploy router`."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    from .app import Router  # here, for --help does not need an HTTP library

    gc.freeze()  # what was imported is no garbage
    gc.set_threshold(YOUNG_OBJECTS)
    # uvloop sends what is written to a connection within one turn with one system call.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Router(options).run())
    return 0
