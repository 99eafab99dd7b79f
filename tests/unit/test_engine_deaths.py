"""Engines in real processes that are killed, die, stop or hang: noticed, told to whoever waits, and
replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from fastdeploy_core.config import WatchdogConfig
from fastdeploy_core.errors import WorkerError
from tests.engine_process import (
    PATIENCE_S,
    POISON,
    QUICK,
    SLOW,
    answer,
    assert_serves,
    engine_of,
    engine_pid,
    rank_pid,
    until,
    until_ready,
)
from tests.null_engine import Collector, expected_answers, make_request

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses /proc")


async def fail_under_load(engine, cause):
    """Streams are running; `cause` happens; all of them must end with an error, soon."""
    requests = [make_request(f"r{i}", [5, 6, i], max_tokens=110) for i in range(4)]
    seen = Collector()
    tasks = [asyncio.create_task(answer(engine, r, seen)) for r in requests]
    await until(lambda: len(seen.first) == len(requests), "the streams did not begin")
    cause()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
    assert all(isinstance(result, WorkerError) for result in results), results


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_killed_engine_is_noticed_and_restarted(num_ranks):
    async def main():
        async with engine_of(null=SLOW, tensor_parallel_size=num_ranks) as engine:
            await fail_under_load(engine, lambda: os.kill(engine_pid(), signal.SIGKILL))
            health = engine.health()
            assert not health.ready and "killed by SIGKILL" in health.reason
            with pytest.raises(WorkerError, match="not ready"):
                engine.check_admission()
            await until_ready(engine)
            assert engine.health().num_restarts == 1
            await assert_serves(engine)

    asyncio.run(main())


def test_a_request_that_ends_its_engine_twice_ends_alone():
    async def main():
        faults = ({"kind": "die", "token": POISON},)
        watchdog = WatchdogConfig(max_restarts=1)
        async with engine_of(device="faulty", faults=faults, watchdog=watchdog) as engine:
            prompts = [[POISON], [5, 6], [5, 7], [5, 8]]
            requests = [make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
            results = await asyncio.wait_for(
                asyncio.gather(*(answer(engine, r) for r in requests), return_exceptions=True),
                PATIENCE_S,
            )
            assert isinstance(results[0], WorkerError)
            assert results[1:] == [expected_answers(request) for request in requests[1:]]
            assert engine.health().num_restarts == 2, "the budget of one was spent once"
            await assert_serves(engine)

    asyncio.run(main())


def test_killed_worker_process_ends_its_engine():
    async def main():
        async with engine_of(null=SLOW, tensor_parallel_size=2) as engine:
            await fail_under_load(engine, lambda: os.kill(rank_pid(), signal.SIGKILL))
            assert "rank 1 was killed by SIGKILL" in engine.health().reason
            await until_ready(engine)
            await assert_serves(engine)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"kind": "die"}, "killed by SIGKILL"),
        ({"kind": "lost", "message": "device is gone"}, "device is gone"),
        ({"kind": "raise", "rank": 1}, "rank 1 failed"),
        ({"kind": "hang"}, "made no progress for"),
        ({"kind": "hang", "rank": 1}, None),
    ],
)
def test_broken_engine_fails_its_streams_and_comes_back(fault, reason, capfd):
    num_ranks = 1 + fault.get("rank", 0)
    if reason is None:
        # A rank that hangs here holds up nobody, for the fake device has no collectives: nothing to
        # see before the engine is closed, and closing must still end it.
        async def main():
            async with engine_of(
                device="faulty", faults=({**fault, "step": 3},), tensor_parallel_size=2
            ) as engine:
                await assert_serves(engine)

        asyncio.run(main())
        return

    async def main():
        # The step counter starts again with the engine: a fault at a step would strike for ever, so
        # it is tied to a request.
        faults = ({**fault, "token": POISON},)
        async with engine_of(
            device="faulty",
            faults=faults,
            null=SLOW,
            tensor_parallel_size=num_ranks,
            watchdog=QUICK,
        ) as engine:
            others = [make_request(f"r{i}", [5, 6, i], max_tokens=110) for i in range(2)]
            bad = make_request("bad", [5, POISON], max_tokens=100)
            results = await asyncio.wait_for(
                asyncio.gather(
                    *[answer(engine, r) for r in (*others, bad)], return_exceptions=True
                ),
                PATIENCE_S,
            )
            assert all(isinstance(result, WorkerError) for result in results), results
            assert reason in engine.health().reason
            await until_ready(engine)
            await assert_serves(engine)

    asyncio.run(main())
    if fault["kind"] == "hang":
        text = capfd.readouterr().err
        early, _, last = text.partition("Timeout (0:00:04)!")
        assert last and "fd-rank0" not in early
        assert early.count("has made no progress for") == 1
        assert "in _fire" in early, "the log does not show where it hung"


def test_stopped_engine_turns_red_and_is_replaced():
    async def main():
        async with engine_of(null=SLOW, watchdog=QUICK) as engine:
            pid = engine_pid()
            await fail_under_load(engine, lambda: os.kill(pid, signal.SIGSTOP))
            await until_ready(engine)
            assert engine_pid() != pid
            await assert_serves(engine)

    asyncio.run(main())


def test_engine_that_keeps_dying_stays_dead():
    async def main():
        faults = ({"kind": "die", "token": POISON},)
        watchdog = WatchdogConfig(max_restarts=1)
        async with engine_of(device="faulty", faults=faults, watchdog=watchdog) as engine:
            await until_ready(engine)
            for name in ("bad", "worse"):  # the second end of each is its own and costs nothing
                await until_ready(engine)
                with pytest.raises(WorkerError):
                    await answer(engine, make_request(name, [POISON]))
            reason = await asyncio.wait_for(engine.wait_dead(), PATIENCE_S)
            assert "killed by SIGKILL" in reason and not engine.health().alive
            with pytest.raises(WorkerError):
                await answer(engine, make_request("late", [5]))
            with pytest.raises(WorkerError):
                await engine.stats()

    asyncio.run(main())
