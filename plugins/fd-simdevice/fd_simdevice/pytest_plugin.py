"""Tests on simulated devices: call `simulate("type")` in a conftest.py and use fixture `simulated`.

PaddlePaddle looks for devices when it is imported, so this has to happen first; where it is
imported already, or cannot be simulated, tests that use the fixture skip and say why.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from .build import SimulationUnavailable, install
from .panel import Panel

MEMORY_GIB = "1"
DELAY_US = "60"  # at most, before each launch
_state: dict[str, str] = {}


def simulate(*types: str) -> None:
    """Put devices of these types in this process and its children: asynchronous, with random
    delays, memory that the host cannot read."""
    if "paddle" in sys.modules:
        _state.setdefault(
            "reason", "PaddlePaddle was imported before the device could be simulated"
        )
        return
    if "folder" not in _state:
        _state["folder"] = tempfile.mkdtemp(prefix="fd-simulated-")
        atexit.register(shutil.rmtree, _state["folder"], ignore_errors=True)
    try:
        os.environ |= install(Path(_state["folder"]), types)
    except SimulationUnavailable as error:
        _state["reason"] = str(error)
        return
    os.environ.setdefault("FD_DEVICE_MEMORY_GIB", MEMORY_GIB)
    os.environ.setdefault("SIM_DELAY_US", DELAY_US)


def panel_folder() -> Path:
    """Folder of the devices' panels; skips where nothing is simulated."""
    if "reason" in _state or "folder" not in _state:
        pytest.skip(_state.get("reason", "conftest.py simulates no device"))
    return Path(_state["folder"]) / "panel"


@pytest.fixture(scope="session")
def simulated() -> Path:
    """Folder of the devices' panels; skips where nothing is simulated."""
    return panel_folder()


@pytest.fixture
def panel(simulated: Path) -> Panel:
    """Knobs and counters of the one device type here."""
    types = [path.name for path in simulated.iterdir()]
    assert len(types) == 1, f"several device types are loaded: {types}"
    return Panel(simulated, types[0])
