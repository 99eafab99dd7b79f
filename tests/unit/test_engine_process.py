"""Engines in real processes: serving, refusing, failing, leaving nothing behind. How they die and
hang under load: test_engine_deaths.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from fastdeploy_core.config import RequestSchedulerConfig, WatchdogConfig
from fastdeploy_core.engine.client import AsyncEngine, LocalEngine
from fastdeploy_core.engine.processes import child
from fastdeploy_core.errors import (
    FastDeployError,
    InvalidRequest,
    QueueFull,
    RequestTimeout,
    RequestTooLong,
    ResourceError,
    WorkerError,
)
from fastdeploy_core.plugins.resolve import resolve
from tests.engine_process import (
    PATIENCE_S,
    POISON,
    QUICK,
    SLOW,
    answer,
    assert_serves,
    descendants,
    engine_of,
    engine_pid,
    folders,
    until,
)
from tests.null_engine import Collector, expected_answers, make_config, make_request
from tests.server_support import wait_for

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses /proc")


def test_many_streams_get_their_own_tokens():
    async def main():
        async with engine_of() as engine:
            requests = [
                make_request(f"r{i}", [5, 6, i % 60], max_tokens=12, n=2, temperature=1.0, seed=i)
                for i in range(40)
            ]
            answers = await asyncio.gather(*[answer(engine, r) for r in requests])
            assert answers == [expected_answers(r) for r in requests]
            stats = await engine.stats()
            assert stats.requests_finished_total == {"length": 40}
            assert stats.num_blocks_used == 0 and stats.num_queued == 0
            assert engine.info.device == "null" and engine.info.num_blocks == 64
            assert engine.num_streams == 0

    asyncio.run(main())


def test_two_ranks_serve_as_one():
    async def main():
        async with engine_of(tensor_parallel_size=2) as engine:
            assert engine.info.tensor_parallel_size == 2
            await assert_serves(engine)

    asyncio.run(main())


def test_local_engine_runs_in_this_process():
    config = make_config(tensor_parallel_size=2)
    engine = LocalEngine(config, resolve(config))
    requests = [make_request(f"r{i}", [5, 6, i], max_tokens=9) for i in range(20)]
    collector = Collector()
    for request in requests:
        engine.add(request)
    while engine.has_work():
        collector.take(engine.step())
    engine.close()
    engine.close()
    assert [collector.answers(r.request_id) for r in requests] == [
        expected_answers(r) for r in requests
    ]
    assert folders() == [] and engine.stats().requests_finished_total == {"length": 20}


def test_client_that_leaves_frees_its_blocks():
    async def main():
        async with engine_of(null=SLOW) as engine:
            async with aclosing(engine.generate(make_request("r", [5] * 20, max_tokens=100))) as s:
                await anext(s)
            deadline = time.monotonic() + PATIENCE_S
            while (stats := await engine.stats()).num_blocks_used:
                assert time.monotonic() < deadline
            assert stats.requests_finished_total == {"abort": 1}
            assert stats.generation_tokens_total < 50
            await assert_serves(engine)

    asyncio.run(main())


def test_storm_of_cancellations_leaves_nothing():
    async def main():
        async with engine_of(null={"step_s": 0.002}) as engine:

            async def brief(i):
                task = asyncio.create_task(answer(engine, make_request(f"r{i}", [5, i % 60])))
                await asyncio.sleep(0.001 * (i % 7))
                task.cancel()
                # On a busy machine an answer may be there before.
                with contextlib.suppress(asyncio.CancelledError):
                    await task

            await asyncio.gather(*[brief(i) for i in range(200)])
            deadline = time.monotonic() + PATIENCE_S
            # One that was taken a moment ago has no blocks yet, and one that has ended still has.
            while any(
                ((now := await engine.stats()).num_requests, now.num_queued, now.num_blocks_used)
            ):
                assert time.monotonic() < deadline
            assert engine.num_streams == 0
            await assert_serves(engine)

    asyncio.run(main())


def test_refusals_carry_their_class_and_the_engine_goes_on():
    async def main():
        async with engine_of(num_blocks=8) as engine:
            for request, error in (
                (make_request("long", [5] * 33), RequestTooLong),
                (make_request("token", [64]), InvalidRequest),
                (make_request("empty", []), InvalidRequest),
                (make_request("logprobs", [5], logprobs=99), InvalidRequest),
            ):
                with pytest.raises(error):
                    await answer(engine, request)
            rejected = (await engine.stats()).requests_rejected_total
            assert rejected == {"RequestTooLong": 1, "InvalidRequest": 3}
            await assert_serves(engine)

    asyncio.run(main())


def test_full_queue_refuses_and_recovers():
    async def main():
        limits = RequestSchedulerConfig(max_size=2)
        async with engine_of(null=SLOW, max_num_seqs=1, request_scheduler=limits) as engine:
            requests = [make_request(f"r{i}", [5, i], max_tokens=20) for i in range(8)]
            tasks = [asyncio.create_task(answer(engine, requests[0]))]
            while (await engine.stats()).num_running == 0:
                pass
            tasks += [asyncio.create_task(answer(engine, r)) for r in requests[1:]]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [r for r in results if isinstance(r, QueueFull)]
            assert len(refused) == 5
            served = [(q, r) for q, r in zip(requests, results, strict=True) if isinstance(r, list)]
            assert len(served) == 3 and all(r == expected_answers(q) for q, r in served)
            await assert_serves(engine)

    asyncio.run(main())


def test_request_that_waits_too_long_times_out():
    async def main():
        limits, slow = RequestSchedulerConfig(ttl_s=3.0), {"step_s": 0.05}
        async with engine_of(null=slow, max_num_seqs=1, request_scheduler=limits) as engine:
            seen = Collector()
            request = make_request("a", [5], max_tokens=100)
            first = asyncio.create_task(answer(engine, request, seen))
            await until(lambda: seen.first, "the first one did not begin")
            with pytest.raises(RequestTimeout):
                await answer(engine, make_request("b", [6]))
            assert len((await first)[0]) == 100

    asyncio.run(main())


def test_unreadable_message_does_not_close_the_socket():
    async def main():
        async with engine_of() as engine:
            life = engine._link._life
            for garbage in (
                b"",
                b"\x80\x04K\x01.",
                b"\xc1",
                os.urandom(64),
                b"\x81\xa4type\xa3Put",
            ):
                with engine._link._send_lock:
                    life.requests.send(garbage)
            await assert_serves(engine)

    asyncio.run(main())


def test_request_that_breaks_its_step_fails_alone():
    async def main():
        faults = ({"kind": "raise", "token": POISON, "message": "secret /path"},)
        async with engine_of(device="faulty", faults=faults, null=SLOW) as engine:
            good = [make_request(f"g{i}", [5, 6, i], max_tokens=10) for i in range(3)]
            bad = make_request("bad", [5, POISON])
            results = await asyncio.gather(
                *[answer(engine, r) for r in (*good, bad)], return_exceptions=True
            )
            assert results[:3] == [expected_answers(r) for r in good]
            assert type(results[3]) is FastDeployError and "secret" not in str(results[3])
            assert engine.health().num_restarts == 0
            await assert_serves(engine)

    asyncio.run(main())


def test_request_with_numbers_that_are_not_finite_fails_alone():
    async def main():
        faults = ({"kind": "nan", "token": POISON},)
        async with engine_of(device="faulty", faults=faults) as engine:
            good, bad = make_request("good", [5, 6], max_tokens=9), make_request("bad", [POISON])
            results = await asyncio.gather(
                answer(engine, good), answer(engine, bad), return_exceptions=True
            )
            assert results[0] == expected_answers(good) and "nan_logits" in str(results[1])

    asyncio.run(main())


def test_requests_without_output_run_again_in_the_next_engine():
    async def main():
        async with engine_of(null=SLOW, max_num_seqs=1) as engine:
            requests = [make_request(f"r{i}", [5, 6, i], max_tokens=50) for i in range(4)]
            seen = Collector()
            tasks = [asyncio.create_task(answer(engine, r, seen)) for r in requests]
            await until(lambda: seen.first, "no stream began")
            os.kill(engine_pid(), signal.SIGKILL)
            results = await asyncio.wait_for(
                asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S
            )
            assert isinstance(results[0], WorkerError), "it had output"
            assert results[1:] == [expected_answers(request) for request in requests[1:]]
            assert engine.health().num_restarts == 1

    asyncio.run(main())


def test_requests_that_wait_for_an_engine_end_when_none_comes():
    async def main():
        watchdog = WatchdogConfig(max_restarts=0)
        async with engine_of(null=SLOW, max_num_seqs=1, watchdog=watchdog) as engine:
            requests = [make_request(f"r{i}", [5, 6, i], max_tokens=50) for i in range(3)]
            seen = Collector()
            tasks = [asyncio.create_task(answer(engine, r, seen)) for r in requests]
            await until(lambda: seen.first, "no stream began")
            os.kill(engine_pid(), signal.SIGKILL)
            results = await asyncio.wait_for(
                asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S
            )
            assert all(isinstance(result, WorkerError) for result in results), results

    asyncio.run(main())


def test_slow_step_is_not_a_hang():
    async def main():
        faults = ({"kind": "slow", "token": POISON, "seconds": 0.9, "times": 5},)
        async with engine_of(device="faulty", faults=faults, watchdog=QUICK) as engine:
            request = make_request("r", [5, POISON], max_tokens=6)
            assert await answer(engine, request) == expected_answers(request)
            assert engine.health().num_restarts == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"faults": ({"kind": "raise", "at_load": True},)}, WorkerError, "injected fault"),
        ({"faults": ({"kind": "die", "at_load": True},)}, WorkerError, "killed by SIGKILL"),
        (
            {"faults": ({"kind": "die", "at_load": True, "rank": 1},), "tensor_parallel_size": 2},
            WorkerError,
            "rank 1 was killed",
        ),
        (
            {
                "faults": ({"kind": "hang", "at_load": True},),
                "watchdog": WatchdogConfig(startup_timeout_s=1.0),
            },
            WorkerError,
            "did not start within 1 s",
        ),
        ({"num_blocks": None, "null": {"num_blocks": 3}}, ResourceError, "needs 32 blocks"),
    ],
)
def test_engine_that_cannot_start_says_why_and_leaves_nothing(options, error, reason, capfd):
    async def main():
        before = descendants()
        config = make_config(device="faulty", **options)
        with pytest.raises(error, match=reason) as caught:
            await AsyncEngine.start(config, resolve(config))
        assert "\n" not in str(caught.value)
        assert descendants() <= before and folders() == []

    asyncio.run(main())
    # Where it was raised helps with a bug, not with a configuration that cannot be served.
    assert ("Traceback" in capfd.readouterr().err) == (reason == "injected fault")


def test_an_engine_that_still_loads_is_not_waited_for(monkeypatch):
    """It does not listen, and has no answers to end: Ctrl-C would take as long as those may."""
    graces, end = [], child.end

    def noted(process, grace_s):
        graces.append(grace_s)
        return end(process, grace_s)

    async def main():
        before = descendants()
        config = make_config(device="faulty", faults=({"kind": "hang", "at_load": True},))
        starting = asyncio.create_task(AsyncEngine.start(config, resolve(config)))
        await until(lambda: descendants() > before, "no engine process was started")
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert descendants() <= before and folders() == []

    monkeypatch.setattr(child, "end", noted)
    asyncio.run(main())
    assert graces and max(graces) <= 1.0


def test_drain_lets_running_requests_end_and_refuses_new_ones():
    async def main():
        async with engine_of(null=SLOW) as engine:
            seen, request = Collector(), make_request("r", [5], max_tokens=20)
            running = asyncio.create_task(answer(engine, request, seen))
            await until(lambda: seen.first, "the stream did not begin")
            drain = asyncio.create_task(engine.drain(600.0))
            await asyncio.sleep(0)
            assert engine.health().draining and not engine.health().ready
            with pytest.raises(WorkerError, match="shutting down"):
                await answer(engine, make_request("late", [5]))
            assert await running == expected_answers(request)
            await drain

    asyncio.run(main())


def test_what_outlives_the_grace_of_a_drain_ends_with_an_error():
    async def main():
        async with engine_of(null={"step_s": 0.1}) as engine:
            seen, request = Collector(), make_request("r", [5], max_tokens=120)
            endless = asyncio.create_task(answer(engine, request, seen))
            await until(lambda: seen.first, "the stream did not begin")
            await engine.drain(0.1)
            with pytest.raises(WorkerError, match="shutting down"):
                await endless

    asyncio.run(main())


def test_idle_engine_uses_next_to_no_processor_time():
    def seconds(pid):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def main():
        async with engine_of() as engine:
            await assert_serves(engine)
            pid = engine_pid()
            own, before = time.process_time(), seconds(pid)
            await asyncio.sleep(2.0)
            assert seconds(pid) - before < 0.2
            assert time.process_time() - own < 0.4
            assert engine.health().ready
            await until(lambda: engine.health().last_progress_age_s < 2.0, "it makes no progress")

    asyncio.run(main())


PARENT = """
import asyncio, sys
from fastdeploy_core.engine.client import AsyncEngine
from fastdeploy_core.plugins.resolve import resolve
from tests.null_engine import make_config

async def main():
    config = make_config(tensor_parallel_size=2)
    await AsyncEngine.start(config, resolve(config))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_engine_and_ranks_die_with_their_parent():
    before = descendants()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert parent.stdout.readline() == b"ready\n"
        children = descendants() - before - {parent.pid}
        assert len(children) == 2
        temporary = Path(tempfile.gettempdir())
        left = [
            folder
            for pid in (parent.pid, *children)
            for folder in temporary.glob(f"{child.FOLDER_PREFIX}*-{pid}-*")
        ]
        assert len(left) == 2
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in children):
        assert time.monotonic() < deadline, "orphans are left"
        time.sleep(0.05)
    # Their folders could not be tidied up by anybody; the next one to make a folder does.
    child.PrivateFolder("engine").remove()
    assert not any(folder.exists() for folder in left)


STARTER = """
import os, sys
sys.path.append(sys.argv[1])
os.environ["PYTHONPATH"] = sys.argv[1]
from fastdeploy_core.engine.processes import child
print(child.spawn("slow_to_import:main", b"", "fd-slow").pid, flush=True)
sys.stdin.read()
"""
SLOW_START = """
import os, time
open(os.path.join(os.path.dirname(__file__), "began"), "w").close()
while not os.path.exists(os.path.join(os.path.dirname(__file__), "told")):
    time.sleep(0.01)
"""


def test_a_child_whose_parent_died_while_its_interpreter_started_ends_at_once(tmp_path):
    """The kernel tells a child of its parent's death only after it was asked to."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(600)\n")
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        pid = int(parent.stdout.readline())
        wait_for(lambda: (tmp_path / "began").exists(), "the child to begin")
    finally:
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()
    (tmp_path / "told").touch()
    try:
        wait_for(lambda: not Path(f"/proc/{pid}/exe").exists(), "the child to end")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_private_folder_is_private_and_safe_while_its_owner_lives():
    folder = child.PrivateFolder("test")
    child.PrivateFolder("test").remove()
    status = folder.path.stat()
    assert status.st_mode & 0o777 == 0o700 and status.st_uid == os.getuid()
    folder.remove()
    assert not folder.path.exists()
