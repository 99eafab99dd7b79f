"""The plugin of docs/how-to/flagos.md, as it stands there, on a simulated device of that name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.plugins.wheels import REPOSITORY, build_wheel, install
from tests.vendors.conftest import _missing
from tests.vendors.test_torch import MODEL, NUM_TOKENS, last_line, run

PAGE = REPOSITORY / "docs" / "how-to" / "flagos.md"
POINTS = """
[fastdeploy.hooks]
flagos = fd_flagos.hooks
[fastdeploy.devices]
flagos = fd_flagos.device:FlagosDevice
"""

pytestmark = pytest.mark.skipif(bool(_missing()), reason=f"not installed: {', '.join(_missing())}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment with the page's plugin, and a module torch_fl that brings device `flagos`."""
    from fd_simdevice.build import SimulationUnavailable
    from fd_simdevice.torch_side import install_torch

    folder = tmp_path_factory.mktemp("flagos")
    device, hooks = re.findall(r"```python[^\n]*\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    files = {
        "fd_flagos/__init__.py": "",
        "fd_flagos/device.py": device,
        "fd_flagos/hooks.py": hooks,
    }
    install(folder / "site", build_wheel(folder, "fd-flagos", files, POINTS))
    try:
        path = install_torch(folder / "torch", "torch_fl", "flagos", "flagcx")["PYTHONPATH"]
    except SimulationUnavailable as error:
        pytest.skip(str(error))
    return {"PYTHONPATH": os.pathsep.join((str(folder / "site"), path)), "FD_PLUGINS": "fd-flagos"}


def test_it_is_chosen_and_says_why_it_is_not(site: dict[str, str], tmp_path: Path) -> None:
    why = ("-m", "fastdeploy_core.cli.main", "plugins", "why", "device", "--json")
    (decision,) = json.loads(run(*why, **site).stdout)["decisions"]
    assert decision["winner"] == "flagos", decision
    without = site | {"PYTHONPATH": site["PYTHONPATH"].partition(os.pathsep)[0]}
    (decision,) = json.loads(run(*why, **without).stdout)["decisions"]
    (row,) = [c for c in decision["candidates"] if c["name"] == "flagos"]
    assert decision["winner"] == "cpu" and "torch_fl" in row["reason"], row


def test_its_tokens_are_the_processors(site: dict[str, str]) -> None:
    program = ("-m", "tests.vendors.torch_tokens", str(MODEL), str(NUM_TOKENS))
    reference, got = last_line(run(*program)), last_line(run(*program, **site))
    assert got["tokens"] == reference["tokens"] and got["operations"] > 20 * NUM_TOKENS


@pytest.mark.slow
def test_it_passes_the_devices_kit_with_two_ranks(site: dict[str, str]) -> None:
    check = ("-m", "fastdeploy_core.cli.main", "plugins", "check", "flagos", "--tensor", "torch")
    more = site | {"FD_PLUGINS": "fd-flagos,fastdeploy-testing"}
    done = run(*check, "-k", "TestDevice", **more)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "max_tensor_parallel_size  PASS" in done.stdout
