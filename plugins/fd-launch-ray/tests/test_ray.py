"""The conformance kit on a real cluster of one node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="needs ray, which session `ray` of nox installs")

from fd_launch_ray.launcher import RayLauncher  # noqa: E402

from fastdeploy_core.errors import ConfigError, WorkerError  # noqa: E402
from fastdeploy_testing.conformance.test_launcher import (  # noqa: E402
    LauncherConformance,
    free_port,
    process_at,
    spec,
    wait_until,
)

MODEL = Path(__file__).resolve().parents[3] / "models" / "ernie-tiny"


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


def test_launch_serves_through_http_alone() -> None:
    """`fastdeploy launch` with servers that Ray has placed; the router asks them directly."""
    address = ray.get_runtime_context().gcs_address
    words = ("launch", str(MODEL), "-n", "2", "--launcher", "ray", "--launcher-config")
    ports = ("--port", str(free_port()), "--instance-port", str(free_port()))
    command = [sys.executable, "-P", "-m", "fastdeploy_core.cli.main", *words]
    command += [f"address={address}", "--max-num-seqs", "4", "--max-model-len", "256", *ports]
    url = f"http://127.0.0.1:{ports[1]}"
    launched = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def num_instances() -> int:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                return int(json.load(answer)["instances"])
        except OSError:
            return 0

    try:
        assert wait_until(lambda: num_instances() == 2, 100)
        body = json.dumps({"prompt": "Once", "max_tokens": 8, "temperature": 0}).encode()
        headers = {"Content-Type": "application/json"}
        texts = set()
        for _ in range(4):
            request = urllib.request.Request(f"{url}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=30) as answer:
                texts.add(json.load(answer)["choices"][0]["text"])
        assert len(texts) == 1
        assert texts != {""}
    finally:
        launched.terminate()
        code = launched.wait(60)
    assert code == 0
    assert num_instances() == 0
