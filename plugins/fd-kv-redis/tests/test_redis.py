"""The conformance kit over a real server, and what happens when that server is full, slow or
gone."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from fd_kv_redis.store import PREFIX, RedisStore
from fd_sched_redis.local_server import SERVERS, RedisProcess

from fastdeploy_core.errors import ConfigError
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_kv_store import (
    SIZES,
    KVStoreConformance,
    name_of,
    parts_of,
)


def start(folder: Path, *settings: str) -> RedisProcess:
    if not any(map(shutil.which, SERVERS)):
        pytest.skip("neither redis-server nor valkey-server is installed")
    server = RedisProcess(folder, *settings)
    server.start()
    return server


def url(server: RedisProcess) -> str:
    return f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    server = start(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisProcess]:
    server = start(tmp_path, "--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru")
    yield server
    server.process.send_signal(signal.SIGCONT)
    server.kill()


class TestRedisStore(KVStoreConformance):
    driver_name = "redis"

    @pytest.fixture
    def options(self, shared: RedisProcess) -> dict[str, Any]:
        return {"url": url(shared)}


class TestHygiene(HygieneConformance):
    kind = "kv_store"
    driver_name = "redis"


def test_a_full_server_keeps_its_size(own: RedisProcess) -> None:
    store, size = RedisStore({"url": url(own)}), 1 << 20
    for number in range(40):
        store.put(name_of(), parts_of(number, (size,)))
    assert 5 < own.client().dbsize() < 20
    store.close()


def test_blocks_that_nobody_reads_are_gone_after_their_time(shared: RedisProcess) -> None:
    store, name = RedisStore({"url": url(shared), "ttl_s": 100}), name_of()
    client = shared.client()
    store.put(name, parts_of(1))
    client.expire(PREFIX + name, 5)
    assert store.get(name, parts_of(0)), "reading begins the time anew"
    assert client.ttl(PREFIX + name) > 90
    client.pexpire(PREFIX + name, 1)
    time.sleep(0.05)
    assert store.find([name]) == 0
    store.close()


def test_a_server_that_goes_and_comes_back(own: RedisProcess) -> None:
    store, name = RedisStore({"url": url(own)}), name_of()
    store.put(name, parts_of(1))
    own.kill()
    for call in (
        lambda: store.find([name]),
        lambda: store.get(name, parts_of(0)),
        lambda: store.put(name, parts_of(2)),
    ):
        with pytest.raises(redis.RedisError):  # which StoredBlocks counts, and computes the block
            call()
    own.start()
    assert store.find([name]) == 0, "it kept nothing"
    store.put(name, parts_of(3))
    found = parts_of(0)
    assert store.get(name, found) and b"".join(found) == bytes([3]) * sum(SIZES)
    store.close()


def test_a_server_that_hangs_is_not_waited_for(own: RedisProcess) -> None:
    store = RedisStore({"url": url(own), "timeout_s": 0.3})
    own.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(redis.RedisError):
        store.get(name_of(), parts_of(0))
    assert 0.3 <= time.monotonic() - started < 60  # it never answers
    store.close()


def test_a_server_that_is_not_there_is_an_error_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 does not answer") as caught:
        RedisStore({"url": "redis://me:secret@127.0.0.1:1/0"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "http://a"}, "redis://"),
        ({"url": 3}, "redis://"),
        ({"ttl_s": 0}, "ttl_s must be above 0"),
        ({"ttl_s": True}, "ttl_s must be above 0"),
        ({"timeout_s": "long"}, "timeout_s must be above 0"),
        ({"path": "/tmp"}, "no option 'path'; possible: url"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RedisStore(options)
