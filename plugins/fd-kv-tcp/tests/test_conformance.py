"""The conformance kit, and what negotiation hears."""

from __future__ import annotations

import pytest

from fastdeploy_core.cli.main import main
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_kv_transport import KVTransportConformance
from fastdeploy_testing.conformance.test_kv_transport_faults import (
    KVTransportFaultsConformance,
)


class TestTcpTransport(KVTransportConformance):
    driver_name = "tcp"


class TestTcpTransportFaults(KVTransportFaultsConformance):
    driver_name = "tcp"


class TestHygiene(HygieneConformance):
    kind = "kv_transport"
    driver_name = "tcp"


def test_why_prefers_shared_memory_on_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "why", "kv_transport", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "winner: shm" in printed and "through host memory and the network" in printed
