"""Vendor devices, simulated. In processes of their own: `pytest tests/vendors`, or nox -s vendors.

The simulated devices are real to PaddlePaddle, so a suite that runs beside others would have them
chosen everywhere.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Six probes import PaddlePaddle side by side, for 2 s each; a machine has one such device.
os.environ.setdefault("FD_PLUGIN_HOOK_TIMEOUT_S", "30")
# Device name -> type name of its simulated device.
DEVICES = {
    "gcu": "gcu",
    "iluvatar": "iluvatar_gpu",
    "metax": "metax_gpu",
    "gaudi": "intel_hpu",
    "xpu": "xpu_stand_in",
    "dcu": "dcu_stand_in",
}


def _is_asked_for(config: pytest.Config) -> bool:
    arguments = [Path(str(a).partition("::")[0]) for a in config.invocation_params.args]
    return any(p.exists() and p.resolve().is_relative_to(HERE) for p in arguments)


def _missing() -> list[str]:
    missing = []
    for name in ("fd-accelerator", "fd-simdevice", *(f"fd-{device}" for device in DEVICES)):
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    return missing


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if _is_asked_for(config) else True


def pytest_configure(config: pytest.Config) -> None:
    if _is_asked_for(config) and not _missing():
        from fd_simdevice.pytest_plugin import simulate

        simulate(*DEVICES.values())


@pytest.fixture(scope="session")
def panels() -> Path:
    """Folder of the panels of all device types; skips where they cannot be simulated."""
    if missing := _missing():
        pytest.skip(f"not installed: {', '.join(missing)}; run: nox -s vendors")
    from fd_simdevice.pytest_plugin import panel_folder

    return panel_folder()
