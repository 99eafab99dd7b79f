"""Real processes killed -9: at each point of a task's life, and at any moment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fd_sched_redis.local_server import SERVERS

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, SERVERS)),
    reason="neither redis-server nor valkey-server is installed",
)
KILL = Path(__file__).parents[1] / "benchmarks" / "kill.py"


def run(*arguments: str) -> dict[str, Any]:
    """What became of the tasks."""
    done = subprocess.run(
        [sys.executable, str(KILL), *arguments], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("point", ["after_take", "in_mid_run", "after_result"])
def test_a_worker_that_dies_there_loses_nothing(point: str) -> None:
    # All four workers die at their first task; four kills start them again.
    result = run("--tasks", "120", "--die", point, "--every", "0.5", "--kills", "8")
    assert (result["lost"], result["doubled"], result["reported as lost"]) == (0, 0, 0), result
    assert result["unaccounted"] == 0
    assert result["counters"]["finished"] == 120


@pytest.mark.parametrize(("victims", "every"), [("workers", "0.9"), ("fronts", "2.5")])
def test_kills_at_any_moment_lose_and_double_nothing(victims: str, every: str) -> None:
    result = run("--tasks", "800", "--kill", victims, "--every", every, "--kills", "4")
    assert result["kills"] >= 1
    assert (result["lost"], result["doubled"], result["reported as lost"]) == (0, 0, 0), result
    assert result["unaccounted"] == 0
