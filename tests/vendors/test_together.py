"""All vendor distributions installed together, fd-cuda among them, on a machine without any of the
chips."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server_process import serving
from tests.vendors.conftest import DEVICES
from tests.vendors.servers import complete

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = (*DEVICES, "cuda")
pytestmark = pytest.mark.usefixtures("panels")


def environment(**more: str) -> dict[str, str]:
    """No simulated devices, and of the plugins only these."""
    dropped = ("FD_", "SIM_", "CUSTOM_DEVICE_ROOT")
    kept = {n: v for n, v in os.environ.items() if not n.startswith(dropped)}
    names = ",".join(f"fd-{device}" for device in INSTALLED)
    return kept | {"FD_PLUGINS": names, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def fastdeploy(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastdeploy_core.cli.main", *arguments],
        env=environment(**more), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_list_names_all_of_them() -> None:
    done = fastdeploy("plugins", "list", "--kind", "device", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)["plugins"]}
    assert [rows[device]["distribution"] for device in INSTALLED] == [
        f"fd-{device}" for device in INSTALLED
    ]


def test_why_device_gives_each_ones_reason() -> None:
    done = fastdeploy("plugins", "why", "device", "--json")
    assert done.returncode == 0, done.stderr
    decision = json.loads(done.stdout)["decisions"][0]
    assert decision["winner"] == "cpu"
    reasons = {c["name"]: c["reason"] for c in decision["candidates"] if not c["accepted"]}
    for device in DEVICES:
        assert "no runtime of it is installed" in reasons[device], reasons[device]
        assert "paddle" in reasons[device].lower()  # what to install
    assert reasons["cuda"]


def test_doctor_says_of_each_what_there_is() -> None:
    done = fastdeploy("plugins", "doctor", "--json")
    checks = json.loads(done.stdout)["checks"]
    failed = [c for c in checks if c["verdict"] == "FAIL"]
    # fd-cuda looks for its driver itself, and there is none; without Triton, its kernels fail, too.
    assert {c["origin"].split()[0] for c in failed} == {"fd-cuda"}, failed
    assert "hooks" in {c["kind"] for c in failed}
    checks = [c for c in checks if c not in failed]
    ours = [c for c in checks if c["origin"].partition(" ")[0] in {f"fd-{d}" for d in INSTALLED}]
    assert len([c for c in ours if c["kind"] == "device"]) == len(INSTALLED)
    # Where Triton is: operations that fd-lora and fd-cuda ask for by name.
    other = [c for c in ours if c["verdict"] != "PASS"]
    assert all("adapted_product" in c["hint"] for c in other), other


def test_asking_for_a_chip_that_is_not_there_says_so() -> None:
    done = fastdeploy("plugins", "why", "device", "--device", "gcu")
    assert done.returncode == 1
    assert "gcu declines" in done.stdout and "paddle-custom-gcu" in done.stdout


def test_cpu_serves_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP, chosen by itself."""
    for name in list(os.environ):
        if name.startswith(("FD_", "SIM_", "CUSTOM_DEVICE_ROOT")):
            monkeypatch.delenv(name)
    extra = {"FD_PLUGINS": environment()["FD_PLUGINS"]}
    options = ("--num-threads", "1", "--max-model-len", "64", "--num-gpu-blocks-override", "8")
    name = ("--served-model-name", "tested")
    with serving(ROOT / "models" / "ernie-tiny", *options, *name, extra=extra) as server:
        assert len(complete(server, [5, 9, 11], 4)) == 4
        assert "device cpu" in server.log


def test_a_broken_one_breaks_nothing(tmp_path: Path) -> None:
    """One vendor's package raises when it is imported; the others and the CPU do not notice."""
    broken = tmp_path / "fd_gcu"
    broken.mkdir()
    (broken / "__init__.py").write_text(
        "raise OSError('libtopsrt.so: cannot open shared object file')\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = fastdeploy("plugins", "why", "device", "--json", PYTHONPATH=path)
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert answer["decisions"][0]["winner"] == "cpu"
    names = {c["name"] for c in answer["decisions"][0]["candidates"]}
    assert names >= set(INSTALLED) - {"gcu"}
    doctor = fastdeploy("plugins", "doctor", "--json", PYTHONPATH=path)
    failed = [c for c in json.loads(doctor.stdout)["checks"] if c["verdict"] == "FAIL"]
    assert {c["origin"].split()[0] for c in failed} == {"fd-gcu", "fd-cuda"}  # fd-cuda: see above
    assert any("fd-gcu" in c["origin"] and "runtime installed" in c["hint"] for c in failed)


def load_page() -> Any:
    """docs/devices_page.py, which reports the lines."""
    spec = importlib.util.spec_from_file_location("devices_page", ROOT / "docs" / "devices_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Of code, without docstrings and comments. Gaudi's drivers include projections and routers, and
# choose which shapes are compiled.
MOST_LINES = dict.fromkeys(DEVICES, 250) | {"gaudi": 360}


@pytest.mark.parametrize("device", DEVICES)
def test_plugins_stay_small(device: str) -> None:
    """Facts, tables, adapters; and no word of another vendor."""
    page = load_page()
    files = sorted(page.package_of(device).glob("*.py"))
    lines = sum(map(page.code_lines, files))
    assert lines <= MOST_LINES[device], f"{lines} lines"
    others = set(DEVICES) - {device}
    text = "\n".join(f.read_text("utf-8") for f in files).lower()
    assert not [other for other in others if other in text]
