"""The conformance kit, and what negotiation hears."""

from __future__ import annotations

import pytest

from fastdeploy_core.cli.main import main
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_kv_transport import KVTransportConformance
from fastdeploy_testing.conformance.test_kv_transport_faults import (
    KVTransportFaultsConformance,
)


class TestSharedMemoryTransport(KVTransportConformance):
    driver_name = "shm"


class TestSharedMemoryTransportFaults(KVTransportFaultsConformance):
    driver_name = "shm"


class TestShownMemory(KVTransportConformance):
    """Memory that is a file is mapped by who reads it."""

    driver_name = "shm"

    @pytest.fixture(autouse=True)
    def _file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FD_KIT_MEMORY", "file")


class TestShownMemoryFaults(KVTransportFaultsConformance):
    driver_name = "shm"

    @pytest.fixture(autouse=True)
    def _file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FD_KIT_MEMORY", "file")


class TestHygiene(HygieneConformance):
    kind = "kv_transport"
    driver_name = "shm"


def test_why_names_the_one_for_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "why", "kv_transport", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "winner: shm" in printed and "same_host=True" in printed
