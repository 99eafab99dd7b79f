"""Several `fastdeploy serve` on one Redis: one service, whichever of them dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from fastdeploy_core.config import RequestSchedulerConfig
from fastdeploy_core.types import SamplingParams
from fastdeploy_testing.fakes import NullModel
from tests.server_process import ServerProcess, serving
from tests.server_support import slowly, wait_for, write_null_model

local_server = pytest.importorskip("fd_sched_redis.local_server", reason="needs fd-sched-redis")
scheduler = pytest.importorskip("fd_sched_redis.scheduler", reason="as above")
front = pytest.importorskip("fd_sched_redis.front", reason="as above")
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, local_server.SERVERS)),
    reason="neither redis-server nor valkey-server is installed",
)

NULL = ("--device", "null", "--block-size", "16", "--max-num-seqs", "4")
BODY = {"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LEASE_S = 30.0  # no instance loses it while the machine stands still
SHORT_S = 5.0  # where what an instance said is to be forgotten


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_null_model(tmp_path_factory.mktemp("null"), step_s=0.01, num_blocks=256)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[local_server.RedisProcess]:
    server = local_server.RedisProcess(tmp_path, "--appendonly", "yes")
    server.start()
    yield server
    server.kill()


@contextmanager
def on_redis(
    model: Path, redis: local_server.RedisProcess, *more: str, lease_s: float = LEASE_S
) -> Iterator[ServerProcess]:
    options = ("--scheduler-name", "global", "--scheduler-config.port", str(redis.port))
    with serving(model, *NULL, *options, "--scheduler-lease", str(lease_s), *more) as process:
        yield process


def expected(prompt: list[int], count: int) -> list[int]:
    return NullModel(259).expected(prompt, count, SamplingParams(temperature=0.0))


def ask(url: str, number: int, count: int) -> list[int]:
    """The tokens of one answer."""
    body = {**BODY, "prompt": [1, 2, number], "max_tokens": count}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def number(url: str, name: str) -> int:
    """A metric of one server."""
    text = httpx.get(f"{url}/metrics").text
    found = re.search(rf"^fastdeploy:{name}{{[^}}]*}} (\S+)$", text, re.M)
    return int(float(found[1])) if found else 0


def engines_of(process: ServerProcess) -> list[int]:
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in process.children()}
    return sorted(pid for pid, line in lines.items() if b"fastdeploy-engine" in line)


def engine_of(process: ServerProcess) -> int:
    (found,) = engines_of(process)
    return found


def test_two_servers_answer_as_one_does(model: Path, redis: local_server.RedisProcess) -> None:
    numbers = range(24)
    with serving(model, *NULL) as one, ThreadPoolExecutor(24) as threads:
        url = one.url
        alone = list(threads.map(lambda n: ask(url, n, 20), numbers))
    with (
        on_redis(model, redis) as first,
        on_redis(model, redis, "--api-server-count", "2") as two,
        ThreadPoolExecutor(24) as threads,
    ):
        urls = (first.url, two.url)
        together = list(threads.map(lambda n: ask(urls[n % 2], n, 20), numbers))
    assert together == alone == [expected([1, 2, n], 20) for n in numbers]
    assert "failed" not in first.log + two.log


def test_engines_of_one_server_are_instances_of_the_queue(
    model: Path, redis: local_server.RedisProcess
) -> None:
    with on_redis(model, redis, "--data-parallel-size", "2") as server, ThreadPoolExecutor(8) as t:
        url = server.url
        body = {**BODY, "max_tokens": 300}
        name = r'^fastdeploy:num_requests_running{engine="\d",[^}]*} (\S+)$'

        def runs_of_each() -> list[str]:
            return re.findall(name, httpx.get(f"{url}/metrics").text, re.M)

        with slowly(model):
            running = [
                t.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
                for _ in range(8)
            ]
            wait_for(lambda: runs_of_each() == ["4.0", "4.0"], "four requests on each engine")
            (victim, _) = engines_of(server)
            os.kill(victim, signal.SIGKILL)
        assert ask(url, 7, 10) == expected([1, 2, 7], 10)  # by the engine that lives
        answers = [r.result() for r in running]
        whole = [answer.json() for answer in answers if answer.status_code == 200]
        # what the other engine ran, and what the queue could hand out again
        assert len(whole) >= 4
        assert {answer.status_code for answer in answers} <= {200, 503}
        for answer in whole:
            assert answer["choices"][0]["token_ids"] == expected([1, 2, 3], 300)
        server.signal()
        assert server.wait() == 0


def test_requests_survive_the_engine_of_their_server(
    model: Path, redis: local_server.RedisProcess
) -> None:
    with on_redis(model, redis) as first, on_redis(model, redis) as second:
        urls = url, _ = first.url, second.url
        body = {**BODY, "max_tokens": 400, "stream": True}
        with ThreadPoolExecutor(40) as threads:
            with slowly(model):
                # Both engines are full of running streams, then requests wait behind them.
                streams = [
                    threads.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
                    for _ in range(8)
                ]
                for of in urls:
                    running, made = (
                        partial(number, of, name)
                        for name in ("num_requests_running", "generation_tokens_total")
                    )
                    wait_for(partial(lambda r, m: r() == 4 and m() > 8, running, made), "streams")
                waiting = [threads.submit(ask, url, n, 10) for n in range(16)]
                time.sleep(0.3)
                os.kill(engine_of(first), signal.SIGKILL)
            assert [w.result() for w in waiting] == [expected([1, 2, n], 10) for n in range(16)]
            texts = [stream.result().text for stream in streams]
        whole = [text for text in texts if '"finish_reason":"length"' in text]
        broken = [text for text in texts if "error" in text]
        # Only streams that the dead engine was answering ended, and each was told.
        assert len(whole) + len(broken) == 8
        assert 1 <= len(broken) <= 4, texts
        wait_for(lambda: "restarted" in first.log, "the engine's restart")
        assert ask(url, 7, 10) == expected([1, 2, 7], 10)


def test_a_drained_instance_leaves_the_queue_to_others(
    model: Path, redis: local_server.RedisProcess
) -> None:
    operator = ("--admin-key", "operator")
    settings = RequestSchedulerConfig("global", options={"port": str(redis.port)}, lease_s=SHORT_S)
    queue = scheduler.GlobalScheduler(settings)
    with (
        on_redis(model, redis, *operator, lease_s=SHORT_S) as first,
        on_redis(model, redis, lease_s=SHORT_S) as second,
    ):
        urls = (first.url, second.url)
        num_tokens = partial(number, name="generation_tokens_total")

        def ask_all() -> int:
            """How many tokens of these answers the first instance made."""
            before = num_tokens(urls[0])
            with ThreadPoolExecutor(12) as threads:  # more than one instance runs at a time
                answers = list(threads.map(lambda n: ask(urls[1], n, 20), range(12)))
            assert answers == [expected([1, 2, n], 20) for n in range(12)]
            return num_tokens(urls[0]) - before

        wait_for(lambda: ask_all() > 0, "both to serve")
        answer = httpx.post(f"{urls[0]}/drain", headers={"Authorization": "Bearer operator"})
        assert answer.status_code == 200
        assert httpx.get(f"{urls[0]}/health/ready").status_code == 503
        assert httpx.get(f"{urls[1]}/health/ready").status_code == 200

        def draining() -> list[bool]:
            return sorted(load.draining for load in queue.loads())

        wait_for(lambda: draining() == [False, True], "the queue to know")
        ask_all()  # it may have been asking for requests in that moment
        assert ask_all() == 0
        lost = engine_of(first)
        os.kill(lost, signal.SIGKILL)
        wait_for(lambda: not {lost}.issuperset(engines_of(first)), "a new engine", 60)
        time.sleep(SHORT_S)  # what the lost one said is forgotten
        wait_for(lambda: draining() == [False, True], "the new engine to be told", 60)
        ask_all()
        assert ask_all() == 0
    queue.close()


def test_streams_go_on_without_redis(model: Path, redis: local_server.RedisProcess) -> None:
    offline = ("--scheduler-config.offline", "15")
    with on_redis(model, redis, *offline) as server, ThreadPoolExecutor(4) as threads:
        url = server.url
        assert ask(url, 4, 2) == expected([1, 2, 4], 2)
        time.sleep(3 * front.MAX_BEAT_S)  # the front end has a view in which its instance is
        with slowly(model):
            stream = threads.submit(ask, url, 5, 480)
            wait_for(lambda: number(url, "num_requests_running") == 1, "the stream to run")
            redis.kill()
            time.sleep(1.0)
            assert ask(url, 6, 10) == expected([1, 2, 6], 10), "the newest view serves"
        assert stream.result() == expected([1, 2, 5], 480)

        def is_refused() -> bool:
            answer = httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 2})
            if answer.status_code == 200:
                return False
            assert answer.status_code == 503 and int(answer.headers["Retry-After"]) >= 1
            assert "request queue" in json.dumps(answer.json())
            return True

        wait_for(is_refused, "requests to be refused")
        redis.start()

        def serves() -> bool:
            answer = httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 2})
            return answer.status_code == 200

        wait_for(serves, "requests to be served again")
        assert ask(url, 8, 10) == expected([1, 2, 8], 10)


def test_a_redis_that_is_not_there_is_named(model: Path) -> None:
    options = ("--scheduler-name", "global", "--scheduler-config.port", "1")
    with serving(model, *NULL, *options) as process:
        assert process.wait() != 0
    assert "Redis at 127.0.0.1:1 does not answer" in process.log
    assert "Traceback" not in process.log
