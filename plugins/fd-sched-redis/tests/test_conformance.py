"""The conformance kit on both drivers."""

from __future__ import annotations

import pytest
from fd_sched_redis.local_server import RedisProcess

from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_request_scheduler import RequestSchedulerConformance


class _OnRedis(RequestSchedulerConformance):
    @pytest.fixture
    def fd_options(self, shared_redis: RedisProcess) -> dict[str, str]:
        return {name: str(value) for name, value in shared_redis.options().items()}


class TestGlobal(_OnRedis):
    driver_name = "global"


class TestSplitwise(_OnRedis):
    driver_name = "splitwise"


class TestHygiene(HygieneConformance):
    kind = "scheduler"
    driver_name = "global"
