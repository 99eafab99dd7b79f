"""Engines in processes of their own, and what they leave behind, for tests."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from fastdeploy_core.config import RequestSchedulerConfig, WatchdogConfig
from fastdeploy_core.engine.client import AsyncEngine
from fastdeploy_core.engine.processes import child
from fastdeploy_core.plugins.resolve import resolve
from tests.null_engine import Collector, expected_answers, make_config, make_request

POISON = 63
PATIENCE_S = 120.0


def folders():
    prefix = f"{child.FOLDER_PREFIX}*-{os.getpid()}-*"
    return sorted(Path(tempfile.gettempdir()).glob(prefix))


def descendants():
    """Processes below this one, by their parents in /proc."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    found, ring = set(), {os.getpid()}
    while ring:
        ring = {pid for pid, parent in parents.items() if parent in ring}
        found |= ring
    return found


@asynccontextmanager
async def engine_of(**options):
    """An engine, and the proof that it leaves nothing behind."""
    before = descendants()
    limits = options.pop("request_scheduler", RequestSchedulerConfig())
    config = replace(make_config(**options), request_scheduler=limits)
    engine = await AsyncEngine.start(config, resolve(config))
    try:
        yield engine
    finally:
        await engine.close()
        await engine.close()
        assert descendants() <= before and folders() == []


async def answer(engine, request, collector=None):
    collector = collector or Collector()
    async for delta in engine.generate(request):
        collector.take([delta])
    return collector.answers(request.request_id)


async def assert_serves(engine, name="survivor"):
    request = make_request(name, [5, 6, 7], max_tokens=5)
    assert await answer(engine, request) == expected_answers(request)


async def until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def until_ready(engine):
    await until(lambda: engine.health().ready, "the engine did not come back")


def engine_pid():
    (pid,) = [
        pid
        for pid in descendants()
        if b"fastdeploy-engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


def rank_pid():
    (pid,) = [
        pid for pid in descendants() if b"fd-rank1" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


SLOW = {"step_s": 0.02}
QUICK = WatchdogConfig(progress_timeout_s=4.0, startup_timeout_s=120.0)
