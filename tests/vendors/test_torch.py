"""Vendors' torch: the common base on a simulated PrivateUse1 device, and how probes tell builds
apart.

Everything in processes of its own: one process works with one tensor library, and knows one such
device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vendors.conftest import DEVICES, _missing

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "ernie-tiny"
NUM_TOKENS = 16
# Vendors whose torch is told by its version, and those told by a module.
MARKED, MODULES = ("dcu", "iluvatar", "metax"), ("gcu", "gaudi")

pytestmark = pytest.mark.skipif(bool(_missing()), reason=f"not installed: {', '.join(_missing())}")


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    dropped = ("FD_", "SIM_", "CUSTOM_DEVICE_ROOT", "PYTHONPATH")
    kept = {n: v for n, v in os.environ.items() if not n.startswith(dropped)}
    names = ",".join(("fastdeploy-testing", *(f"fd-{v}" for v in DEVICES)))  # only these plugins
    path = os.pathsep.join(p for p in (str(ROOT), more.pop("PYTHONPATH", "")) if p)
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=550,
        check=False,
        env=kept | {
            "FD_PLUGINS": names, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "SIM_MEM_MB": "512",
        } | more,
    )  # fmt: skip


def last_line(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which module torch_gcu makes torch know a simulated device `gcu`."""
    from fd_simdevice.build import SimulationUnavailable
    from fd_simdevice.torch_side import install_torch

    try:
        folder = tmp_path_factory.mktemp("torch_gcu")
        return {"PYTHONPATH": install_torch(folder, "torch_gcu", "gcu", "eccl")["PYTHONPATH"]}
    except SimulationUnavailable as error:
        pytest.skip(str(error))


def test_16_greedy_tokens_equal_the_processors(stand_in: dict[str, str]) -> None:
    """No device is named: with the vendor's module its device is picked, without it the
    processor."""
    program = ("-m", "tests.vendors.torch_tokens", str(MODEL), str(NUM_TOKENS))
    reference, got = last_line(run(*program)), last_line(run(*program, **stand_in))
    assert all(len(tokens) == NUM_TOKENS for tokens in reference["tokens"])
    assert got["tokens"] == reference["tokens"]
    assert got["operations"] > 20 * NUM_TOKENS and got["late_copies"] >= NUM_TOKENS
    assert reference["operations"] == 0


def test_hygiene_and_device_kit_with_two_ranks(stand_in: dict[str, str]) -> None:
    check = ("-m", "fastdeploy_core.cli.main", "plugins", "check", "gcu", "--tensor", "torch")
    done = run(*check, "-k", "TestHygiene or TestDevice", **stand_in)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "max_tensor_parallel_size  PASS" in done.stdout


@pytest.mark.slow
def test_whole_kit(stand_in: dict[str, str]) -> None:
    check = ("-m", "fastdeploy_core.cli.main", "plugins", "check", "gcu", "--tensor", "torch")
    done = run(*check, **stand_in)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "TestEndToEnd              PASS" in done.stdout


@pytest.mark.slow
def test_doctor_examines_it_on_torch(stand_in: dict[str, str]) -> None:
    doctor = ("-m", "fastdeploy_core.cli.main", "plugins", "doctor", "--json")
    done = run(*doctor, **stand_in | {"FD_PLUGINS": "fd-gcu"})
    assert done.returncode == 0, done.stdout[-3000:]
    for words in ("with torch_gcu, collectives eccl", "two ranks agree", "does not tell"):
        assert words in done.stdout


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Answers of all probes on builds of torch that exist as metadata and empty modules."""
    return last_line(
        run("-m", "tests.vendors.torch_probes", str(tmp_path_factory.mktemp("builds")))
    )


@pytest.mark.parametrize("vendor", [*MARKED, *MODULES])
def test_a_probe_takes_its_own_torch_only(probes: Any, vendor: str) -> None:
    answers = probes[vendor]
    assert answers[vendor]["accepted"], answers[vendor]["reason"]
    assert answers[vendor]["details"]["tensor_library"] == "torch"
    assert answers[vendor]["details"]["chips"] == "2"
    for other in {"plain", *MARKED} - {vendor}:
        assert not answers[other]["accepted"], other
        assert "install the vendor's torch" in answers[other]["reason"]
    assert "finds no chip" in answers["no chip"]["reason"]


def test_each_library_is_asked_for_itself(probes: Any) -> None:
    for vendor, answers in probes.items():
        assert not answers["on paddle"]["accepted"]
        assert "torch" not in answers["on paddle"]["reason"].lower(), vendor
    # No chip on PaddlePaddle: torch is the second door, and a refusal says both reasons.
    assert probes["gcu"]["on any"]["accepted"]
    reason = probes["metax"]["on any"]["reason"]
    assert "no runtime of it is installed" in reason and "and on torch: torch" in reason
    # Its torch is too old: PaddlePaddle alone.
    assert "on torch" not in probes["xpu"]["on any"]["reason"]
