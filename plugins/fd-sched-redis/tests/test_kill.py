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
        [sys.executable, str(KILL), *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# 300 tasks take two seconds at least, so somebody is killed.
SHORT = ("--tasks", "300", "--lease", "1", "--kills", "4")
LONG = ("--tasks", "2000", "--kills", "16")


def lost_nothing(result: dict[str, Any]) -> bool:
    wrong = ("lost", "doubled", "reported as lost", "unaccounted")
    return not any(result[name] for name in wrong)


@pytest.mark.parametrize("point", ["after_take", "in_mid_run", "after_result"])
def test_a_worker_that_dies_there_loses_nothing(point: str) -> None:
    # All four workers die at their first task; kills start them again.
    result = run(*SHORT, "--tasks", "60", "--every", "0.25", "--kills", "8", "--die", point)
    assert lost_nothing(result), result
    assert result["counters"]["finished"] == 60


@pytest.mark.parametrize(
    "kills",
    [
        (*SHORT, "--kill", "workers", "--every", "0.4"),
        (*SHORT, "--kill", "fronts", "--every", "0.8"),
        # Faster than leases end, so that what one takes over has soon lost its front end again.
        (*SHORT, "--kill", "fronts", "--every", "0.2", "--kills", "12"),
        pytest.param((*LONG, "--kill", "workers", "--every", "0.9"), marks=pytest.mark.slow),
        pytest.param((*LONG, "--kill", "fronts", "--every", "2.5"), marks=pytest.mark.slow),
    ],
)
def test_kills_at_any_moment_lose_and_double_nothing(kills: tuple[str, ...]) -> None:
    result = run(*kills)
    assert result["kills"] >= 1
    assert lost_nothing(result), result
