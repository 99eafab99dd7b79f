"""The conformance kit, and what negotiation hears."""

from __future__ import annotations

import pytest

from fastdeploy_core.cli.main import main
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_kv_transport import KVTransportConformance
from fastdeploy_testing.conformance.test_kv_transport_faults import (
    KVTransportFaultsConformance,
)

pytest.importorskip(
    "mooncake.engine",
    reason="Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda",
    exc_type=ImportError,
)


class TestMooncakeTransport(KVTransportConformance):
    driver_name = "mooncake"


class TestMooncakeTransportFaults(KVTransportFaultsConformance):
    driver_name = "mooncake"


class TestHygiene(HygieneConformance):
    kind = "kv_transport"
    driver_name = "mooncake"


def test_why_takes_it_by_its_name_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "why", "kv_transport", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "winner: shm" in printed and "--kv-transport mooncake" in printed
