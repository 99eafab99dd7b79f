"""Fixtures: a real redis-server or valkey-server."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fd_sched_redis.local_server import SERVERS, RedisProcess

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]


def _need_server() -> None:
    if not any(map(shutil.which, SERVERS)):
        pytest.skip("neither redis-server nor valkey-server is installed")


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[..., RedisProcess]]:
    """start_redis(*settings) starts a server of the test's own."""
    _need_server()
    started: list[RedisProcess] = []

    def start(*settings: str, program: str = "") -> RedisProcess:
        folder = tmp_path / f"redis{len(started)}"
        folder.mkdir()
        server = RedisProcess(folder, *settings, program=program)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """One server for tests that leave it as it was."""
    _need_server()
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()
