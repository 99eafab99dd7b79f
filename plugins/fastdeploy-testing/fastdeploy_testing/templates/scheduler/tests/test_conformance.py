"""The core's conformance kit, for this scheduler."""

from pathlib import Path

import pytest

from fastdeploy_testing.conformance.test_request_scheduler import RequestSchedulerConformance


class TestMyQueue(RequestSchedulerConformance):
    kind = "scheduler"
    driver_name = "myqueue"

    @pytest.fixture
    def fd_options(self, tmp_path: Path) -> dict[str, str]:
        """What --scheduler-config says."""
        return {"folder": str(tmp_path)}
