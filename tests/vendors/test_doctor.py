"""`plugins doctor` on a device that is here: operations, one collective, versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_core.contracts.ops import OPERATIONS


def examined(**more: str) -> list[list[object]]:
    done = subprocess.run(
        [sys.executable, "-m", "fastdeploy_testing.examine", "metax", "--json"],
        env=os.environ | more, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[object]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.slow
def test_every_operation_is_examined(panels: Path) -> None:
    from fd_simdevice.build import install

    rows = examined(**install(panels.parent / "only-metax", ["metax_gpu"]))
    assert [
        "operations",
        True,
        f"{len(OPERATIONS)} of {len(OPERATIONS)} run on the device alone",
    ] in rows
    assert ["collective", True, "two ranks agree"] in rows
    assert all(passed for _, passed, _ in rows)
    assert any("not a known pair" in str(words) for _, _, words in rows)
    assert not [row for row in rows if row[2] == "not examined"]


def test_a_wrong_kernel_and_a_missing_one_are_named(panels: Path) -> None:
    from fastdeploy_core.contracts.device import DeviceOptions
    from fastdeploy_core.plugins.drivers import lookup
    from fastdeploy_core.plugins.kernels import REFERENCE, build_kernel_table
    from fastdeploy_testing import examine

    device = lookup("device", "metax")(DeviceOptions())
    reference = build_kernel_table(REFERENCE)
    right = build_kernel_table("metax")["rms_norm"]
    chosen = {"rms_norm": lambda x, weight, eps: right(x, weight, eps) * 1.01}
    with device.xp.no_grad():
        make = examine.sample_arguments(device)["rms_norm"]
        (row,) = examine._compare(device, chosen, reference, "rms_norm", make)
        assert not row[1] and "differs from the reference by" in row[2]

        def needs_a_detour(x: object) -> object:
            import paddle

            return paddle.linalg.cholesky(x)

        def square() -> tuple[object, ...]:
            return (device.to_device(np.eye(3, dtype="float32")),)

        assert examine._missing_kernel(device, needs_a_detour, square) == "cholesky"
    device.close()
