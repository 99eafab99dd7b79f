"""The conformance kit, for launchers of processes; and what only a list of hosts has."""

from __future__ import annotations

import sys
from typing import ClassVar

import pytest
from fd_launch.processes import LocalLauncher, StaticLauncher

from fastdeploy_core.contracts.small import InstanceSpec
from fastdeploy_core.errors import ConfigError, WorkerError
from fastdeploy_testing.conformance.test_launcher import (
    LauncherConformance,
    process_at,
    spec,
    wait_until,
)


class TestLocal(LauncherConformance):
    kind = "launcher"
    driver_name = "local"


class TestStatic(LauncherConformance):
    kind = "launcher"
    driver_name = "static"
    options: ClassVar = {"ips": "127.0.0.1", "node_rank": "0"}


def test_each_host_starts_its_own_servers() -> None:
    nodes = [
        StaticLauncher({"ips": "127.0.0.1, 127.0.0.2", "node_rank": str(rank)}) for rank in (0, 1)
    ]
    specs = [spec(name) for name in "abc"]
    try:
        addresses = nodes[0].start(specs)
        assert [one.rpartition(":")[0] for one in addresses] == [
            *("127.0.0.1", "127.0.0.2", "127.0.0.1"),
        ]
        assert wait_until(lambda: bool(process_at(addresses[0]) and process_at(addresses[2])), 60)
        assert not process_at(addresses[1])
        assert nodes[1].start(specs) == addresses
        assert wait_until(lambda: bool(process_at(addresses[1])), 60)
        assert [node.is_head for node in nodes] == [True, False]
        # What another process is in charge of is not told.
        assert nodes[0].exit_code("b") is nodes[1].exit_code("a") is None
        nodes[1].stop(5)
        assert not process_at(addresses[1])
        assert process_at(addresses[0])
    finally:
        for node in nodes:
            node.stop(0)


def test_an_address_of_ipv6_is_written_as_urls_have_it() -> None:
    node = StaticLauncher({"ips": "::1,fd00::2", "node_rank": "1"})
    node._node = 7  # of none: nothing is started
    assert node.start([InstanceSpec("a", (), 80), InstanceSpec("b", (), 81)]) == [
        *("[::1]:80", "[fd00::2]:81"),
    ]


@pytest.mark.parametrize(
    "options", [{}, {"ips": "a"}, {"ips": "a", "node_rank": "1"}, {"ips": "a", "node_rank": "-1"}]
)
def test_a_list_of_hosts_needs_both_options(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--ips with the addresses of all hosts"):
        StaticLauncher(options)


def test_servers_of_one_host_do_not_share_devices() -> None:
    specs = [InstanceSpec(name, (), 1, num_devices=1) for name in "ab"]
    with pytest.raises(ConfigError, match="--data-parallel-size"):
        LocalLauncher({}).start(specs)


def test_nothing_is_left_when_one_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = LocalLauncher({})
    specs = [spec("a"), spec("b")]
    (address,) = launcher.start(specs[:1])
    assert wait_until(lambda: bool(process_at(address)), 60)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(WorkerError, match="cannot start b"):
        launcher.start(specs[1:])
    assert not process_at(address)
