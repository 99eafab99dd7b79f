"""The kit's tests of leases and of shared queues, against a driver that has both."""

from __future__ import annotations

import pytest
from shared_queue import SharedQueue

from fastdeploy_testing.conformance.test_request_scheduler import RequestSchedulerConformance


class TestSharedQueue(RequestSchedulerConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> type[SharedQueue]:
        return SharedQueue
