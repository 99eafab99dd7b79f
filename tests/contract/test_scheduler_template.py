"""The template of a request scheduler passes the kit, and a queue outlives its processes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core.config import RequestSchedulerConfig
from fastdeploy_core.contracts.scheduler import RequestScheduler
from fastdeploy_testing.conformance.scheduler_side import PLENTY, request
from fastdeploy_testing.conformance.test_request_scheduler import RequestSchedulerConformance
from fastdeploy_testing.new import TEMPLATE_FOLDER

FOLDER = TEMPLATE_FOLDER / "scheduler" / "src" / "fd_myqueue"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("fd_myqueue.scheduler", FOLDER / "scheduler.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MyQueueScheduler


class TestMyQueue(RequestSchedulerConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Any:
        return load()

    @pytest.fixture
    def fd_options(self, tmp_path: Path) -> dict[str, str]:
        return {"folder": str(tmp_path)}


def test_requests_survive_a_kill_of_the_process_that_put_them(tmp_path: Path) -> None:
    program = f"""
import os, sys
sys.path.insert(0, {str(FOLDER.parent)!r})
from fd_myqueue.scheduler import MyQueueScheduler
from fastdeploy_core.config import RequestSchedulerConfig
from fastdeploy_testing.conformance.scheduler_side import request
queue = MyQueueScheduler(RequestSchedulerConfig(options={{"folder": {str(tmp_path)!r}}}))
assert queue.put_requests([request("a"), request("b")]) == [None, None]
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    config = RequestSchedulerConfig(options={"folder": str(tmp_path)})
    queue = load()(config)
    assert isinstance(queue, RequestScheduler)
    assert [r.request_id for r in queue.get_requests(PLENTY, 5.0)] == ["a", "b"]
    assert queue.put_requests([request("a")]) != [None]
    queue.close()
