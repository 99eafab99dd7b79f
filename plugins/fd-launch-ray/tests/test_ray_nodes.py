"""A real cluster of several nodes on this host, each with an address of its own; one is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs ray, which session `ray` of nox installs")

from fd_launch_ray.launcher import LOST, RayLauncher  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from server_process import REPOSITORY, command, environment  # noqa: E402

from fastdeploy_testing.conformance.test_launcher import (  # noqa: E402
    free_port,
    process_at,
    spec,
    wait_until,
)

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="each node has a loopback address of its own"
)
MODEL = REPOSITORY / "models" / "ernie-tiny"


class Nodes:
    """The cluster: a head without room for servers, and two nodes with room for one each."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self.cluster.address
        self._hosts = (f"127.0.0.{number}" for number in range(2, 255))
        self._nodes: dict[str, Any] = {}
        self.add()
        self.add()
        self.cluster.connect()

    def add(self) -> str:
        """One more node; its address."""
        host = next(self._hosts)
        self._nodes[host] = self.cluster.add_node(num_cpus=1, node_ip_address=host)
        return host

    def lose(self, host: str) -> None:
        """Kill all of a node's processes."""
        self.cluster.remove_node(self._nodes.pop(host), allow_graceful=False)

    @property
    def hosts(self) -> set[str]:
        """Addresses of the nodes with room."""
        return set(self._nodes)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    ray.shutdown()
    made.cluster.shutdown()


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def test_servers_spread_over_nodes_and_leave_a_lost_one(nodes: Nodes) -> None:
    launcher = RayLauncher({"address": nodes.address, "strategy": "STRICT_SPREAD"})
    try:
        one, other = launcher.start([spec("a"), spec("b")])
        assert {_host(one), _host(other)} == nodes.hosts
        assert wait_until(lambda: process_at(one) and process_at(other), 60)
        kept = process_at(other)
        nodes.lose(_host(one))
        assert wait_until(lambda: launcher.exit_code("a") == LOST, 60)
        assert wait_until(lambda: not process_at(one), 30), "a server outlives its node"
        assert launcher.exit_code("b") is None
        new = nodes.add()
        moved = launcher.restart("a")
        assert _host(moved) == new
        assert wait_until(lambda: process_at(moved), 60)
        assert process_at(other) == kept
    finally:
        launcher.stop(5)
    assert not process_at(moved) and not process_at(other)


def test_launch_goes_on_when_a_node_is_lost(nodes: Nodes, tmp_path: Path) -> None:
    """Greedy answers before, while one of two servers is gone, and after it was moved."""
    url = f"http://127.0.0.1:{free_port()}"
    words = ["launch", str(MODEL), "-n", "2", "--launcher", "ray", "--launcher-config"]
    words += [
        f"address={nodes.address}",
        "strategy=STRICT_SPREAD",
        "timeout=15",
        "--port",
        url.rpartition(":")[2],
    ]
    words += ["--instance-port", str(free_port()), "--max-num-seqs", "4", "--max-model-len", "256"]
    log = (tmp_path / "log").open("w")
    launched = subprocess.Popen(command(*words), env=environment(), stdout=log, stderr=log)

    def said() -> str:
        return Path(log.name).read_text("utf-8")

    def num_instances() -> int:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                return int(json.load(answer)["instances"])
        except OSError:
            return 0

    def answer() -> str:
        body = json.dumps({"prompt": "Once", "max_tokens": 8, "temperature": 0}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return str(json.load(response)["choices"][0]["text"])
        except OSError:
            return ""

    try:
        assert wait_until(lambda: num_instances() == 2, 100), said()
        first = answer()
        assert first != ""
        lost = min(nodes.hosts)
        nodes.lose(lost)
        assert wait_until(lambda: "it is tried again" in said(), 100), said()
        assert answer() == first, "the other server answers while there is no room for this one"
        new = nodes.add()
        assert wait_until(lambda: f" is at {new}:" in said(), 100), said()
        assert wait_until(lambda: num_instances() == 2, 100), said()
        assert {answer() for _ in range(4)} == {first}
    finally:
        launched.terminate()
        code = launched.wait(60)
        log.close()
    assert code == 0
    assert num_instances() == 0
