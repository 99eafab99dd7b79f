"""The conformance kit on a real cluster of one node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

ray = pytest.importorskip("ray", reason="needs ray, which session `ray` of nox installs")

from fd_launch_ray.launcher import RayLauncher  # noqa: E402

from fastdeploy_core.errors import ConfigError, WorkerError  # noqa: E402
from fastdeploy_testing.conformance.test_launcher import (  # noqa: E402
    LauncherConformance,
    process_at,
    spec,
    wait_until,
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Of this process, with four CPUs whatever the machine has."""
    ray.init(num_cpus=4, num_gpus=0, include_dashboard=False)
    yield
    ray.shutdown()


class TestRay(LauncherConformance):
    kind = "launcher"
    driver_name = "ray"


def test_all_get_their_place_or_none_starts() -> None:
    launcher = RayLauncher({"cpus": "3", "timeout": "3"})
    with pytest.raises(WorkerError, match=r"no room for 2 servers.*together have 4 CPU and 0 GPU"):
        launcher.start([spec("a"), spec("b")])
    small = RayLauncher({"cpus": "4", "timeout": "20"})  # nothing was kept
    try:
        (address,) = small.start([spec("a")])
        assert wait_until(lambda: bool(process_at(address)), 60)
    finally:
        small.stop(5)


def test_a_lost_actor_is_a_server_that_ended() -> None:
    launcher = RayLauncher({})
    try:
        (address,) = launcher.start([spec("a")])
        assert wait_until(lambda: bool(process_at(address)), 60)
        ray.kill(launcher._actors["a"])
        assert wait_until(lambda: launcher.exit_code("a") is not None, 30)
        assert wait_until(lambda: not process_at(address), 30), "the server outlives its actor"
        again = launcher.restart("a")
        assert wait_until(lambda: bool(process_at(again)), 60)
    finally:
        launcher.stop(5)


def test_options_that_cannot_work_are_refused() -> None:
    for options in ({"cpus": "many"}, {"strategy": "NEAR"}):
        with pytest.raises(ConfigError, match="launcher ray"):
            RayLauncher(options)
