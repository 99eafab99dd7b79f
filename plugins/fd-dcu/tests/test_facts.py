"""What of this plugin does not need a chip."""

import json

import pytest
from fd_dcu.device import FACTS, DcuDevice

from fastdeploy_core.contracts.device import DeviceOptions

pytestmark = pytest.mark.usefixtures("simulated")


def test_memory_tool_is_read():
    card = {"VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "702699520"}
    assert DcuDevice.parse_memory(json.dumps({"card0": card})) == (68_000_000_000, 68_702_699_520)


def test_built_in_place_is_preferred_to_a_stand_in(monkeypatch):
    from fd_accelerator import paddle_device, paddle_place

    assert paddle_device._door(FACTS) == ("dcu_stand_in", "")
    monkeypatch.setattr(paddle_place.paddle, "is_compiled_with_rocm", lambda: True)
    assert paddle_device._door(FACTS) == ("gpu", "cuda")


def test_memory_comes_from_the_tool_when_it_is_installed(monkeypatch, tmp_path):
    tool = tmp_path / "rocm-smi"
    card = {"VRAM Total Memory (B)": "1000", "VRAM Total Used Memory (B)": "400"}
    tool.write_text(f"#!/bin/sh\necho '{json.dumps({'card0': card})}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    info = DcuDevice(DeviceOptions()).memory()
    assert (info.free_bytes, info.total_bytes) == (600, 1000)
