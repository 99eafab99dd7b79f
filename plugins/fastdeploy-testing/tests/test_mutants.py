"""The kit fails every wrong kernel that can be generated from the declarations (mutants.py)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fastdeploy_testing.conformance.declared import DECLARED
from fastdeploy_testing.conformance.mutants import FEWEST, Spoilt, mutants_of
from fastdeploy_testing.conformance.test_ops import OpsConformance

KIT = "fastdeploy_testing.conformance"


def hunt(library: str, *words: str) -> tuple[int, dict[str, tuple[int, int, str]], str]:
    """(exit code, {operation: (mutants, killed, names of the living)}, last line of the table)."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider",
         "-p", "fastdeploy_testing.pytest_plugin", "-p", "fastdeploy_testing.conformance.mutants",
         "--pyargs", f"{KIT}.test_ops", f"{KIT}.test_quantized_ops",
         "--fd-driver", "cpu", "--fd-kind", "kernels", "--fd-tensor", library, *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    scores, score = {}, ""
    for line in done.stdout.splitlines():
        cells = line.split(maxsplit=3)
        if len(cells) > 2 and cells[0] in DECLARED and cells[1].isdigit():
            scores[cells[0]] = (int(cells[1]), int(cells[2]), "".join(cells[3:]))
        elif "mutants of" in line:
            score = line
    return done.returncode, scores, score or done.stdout[-2000:] + done.stderr[-2000:]


def test_no_mutant_of_any_operation_lives(tensor_library: str) -> None:
    code, scores, score = hunt(tensor_library)
    alive = {operation: names for operation, (_, _, names) in scores.items() if names}
    assert not alive, score
    assert set(scores) == set(DECLARED), "every operation has a test that calls it"
    assert min(made for made, _, _ in scores.values()) >= FEWEST
    assert code == 0, score


def test_a_kit_that_looks_away_is_found_out(tensor_library: str) -> None:
    """With rows of no tokens alone, nearly every mutant lives."""
    code, scores, _ = hunt(tensor_library, "-k", "test_place_tokens and 0")
    assert code == 1
    made, killed, names = scores["place_tokens"]
    assert killed < made and "positions is ignored" in names


def test_mutants_come_from_the_declaration() -> None:
    names = {m.name for m in mutants_of(DECLARED["add_rms_norm"])}
    assert {
        "eps is always 1e-06",
        "residual is ignored",
        "residual is overwritten",
        "x is rounded to bfloat16",
        "result 1 lacks its last column",
        "result 0 has another dtype",
        "result 0 is that of the call before",
    } <= names
    written = {m.name for m in mutants_of(DECLARED["kv_write"])}
    assert "cache[-1] lacks the last row that is written" in written


@pytest.mark.parametrize("operation", ["linear", "linear_logits", "greedy_linear", "rms_norm"])
def test_sums_in_16_bits_fail(tensor_library: str, operation: str) -> None:
    """The one fault that no change of arguments or results imitates."""
    from fastdeploy_core.contracts.device import DeviceOptions
    from fastdeploy_core.plugins.kernels import build_kernel_table
    from fastdeploy_core.reference.device import CpuDevice

    device = CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))
    if "bfloat16" not in device.limits.dtypes:
        pytest.skip(f"the device's dtypes are {device.limits.dtypes}")
    kernels, xp = build_kernel_table("cpu"), device.xp

    def summed(x: Any, weight: Any, bias: Any) -> Any:
        total = kernels["linear"](x[:, :8], weight[:, :8], bias)
        for begin in range(8, x.shape[1], 8):
            part = slice(begin, begin + 8)
            total = total + kernels["linear"](x[:, part], weight[:, part], None)
        return total

    def normed(x: Any, weight: Any, eps: float) -> Any:
        total = x[:, :1] * 0
        for column in range(x.shape[1]):
            total = total + x[:, column : column + 1] * x[:, column : column + 1]
        return x * (total / x.shape[1] + eps).rsqrt() * weight

    wrong = {
        "linear": summed,
        "linear_logits": lambda *given: summed(*given).float(),
        "greedy_linear": lambda *given: (
            xp.argmax(summed(*given), -1), summed(*given).float().amax(dim=-1),
        ),
        "rms_norm": normed,
    }[operation]  # fmt: skip

    class Table(Spoilt):
        def __getitem__(self, name: str) -> Any:
            return wrong if name == operation else kernels[name]

    OpsConformance().test_long_sums_keep_small_parts(device, kernels, "bfloat16")
    with pytest.raises(AssertionError, match="off by"):
        OpsConformance().test_long_sums_keep_small_parts(device, Table(kernels), "bfloat16")


def test_expected_values_do_not_change_with_what_a_kernel_writes(tensor_library: str) -> None:
    from fastdeploy_core.contracts.device import DeviceOptions
    from fastdeploy_core.reference.device import CpuDevice

    device = CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))
    array = np.ones(4, "float32")
    OpsConformance().to_device(device, array).zero_()
    assert array.tolist() == [1, 1, 1, 1]
