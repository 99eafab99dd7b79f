"""Products in fd-quant-wint2's two bits on fd-cpu's device, against that plugin's reference
operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.quant_formats import PackedWeight
from fastdeploy_core.plugins.kernels import build_kernel_table

pytest.importorskip("fd_cpu._native", reason="fd-cpu is not installed")
formats = pytest.importorskip("fd_quant_wint2.formats", reason="fd-quant-wint2 is not installed")


@pytest.fixture
def device(tensor_library: str) -> Iterator[Any]:
    from fd_cpu.device import X86Device

    made = X86Device(DeviceOptions(tensor_library=tensor_library, num_threads=2))
    with made.xp.no_grad():
        yield made
    made.close()


def trellis(device: Any, outputs: int, inputs: int, block: int, experts: int = 0) -> PackedWeight:
    """Any words are a valid code; experts rotate their inputs differently."""
    rng = np.random.default_rng(outputs + inputs)
    lead = (experts,) if experts else ()
    words = rng.integers(-(1 << 31), 1 << 31, (*lead, outputs // 64, inputs // 8, 32))
    arrays = {
        "weight": words.astype(np.int32),
        "scale": rng.uniform(0.5, 1.5, (*lead, outputs)).astype(np.float32),
        "signs": rng.choice(np.array([-1, 1], np.int8), (*lead, inputs)),
        "block": np.full((*lead, 1), block, np.int32),
    }
    tensors = {name: device.to_device(array) for name, array in arrays.items()}
    return PackedWeight(formats.TET[2], outputs, inputs, tensors, experts)


def check(device: Any, got: Any, wanted: Any) -> None:
    ours, theirs = (np.array(device.to_host(y.float())) for y in (got, wanted))
    # Activations are rounded to int8, and where there are experts twice.
    assert np.linalg.norm(ours - theirs) < 2e-2 * np.linalg.norm(theirs)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_linear(device: Any, tokens: int) -> None:
    weight = trellis(device, 192, 384, 128)
    x = device.to_device(
        np.random.default_rng(tokens).standard_normal((tokens, 384)).astype(np.float32)
    )
    ours, theirs = build_kernel_table("x86"), build_kernel_table("cpu")
    got = ours["linear_tet2"](x, ours.prepare("linear_tet2", weight), None)
    check(device, got, theirs["linear_tet2"](x, weight, None))


@pytest.mark.parametrize("tokens", [1, 30])
def test_experts(device: Any, tokens: int) -> None:
    gate_up, down = trellis(device, 256, 128, 128, 4), trellis(device, 128, 128, 64, 4)
    rng = np.random.default_rng(tokens)
    x = device.to_device(rng.standard_normal((tokens, 128)).astype(np.float32))
    ids = device.to_device(np.argsort(rng.random((tokens, 4)), -1)[:, :2].astype(np.int64))
    shares = device.to_device(rng.random((tokens, 2)).astype(np.float32))
    ours, theirs = build_kernel_table("x86"), build_kernel_table("cpu")
    name = "moe_experts_tet2"
    got = ours[name](x, ids, shares, ours.prepare(name, gate_up), ours.prepare(name, down))
    check(device, got, theirs[name](x, ids, shares, gate_up, down))


def test_kept_weights_multiply_as_before(device: Any) -> None:
    ours = build_kernel_table("x86")
    x = device.to_device(np.random.default_rng(3).standard_normal((3, 96)).astype("f4"))
    prepared = ours.prepare("linear_tet2", trellis(device, 128, 96, 32))
    facts, arrays = device.dump_weight(prepared)
    again = device.restore_weight(facts, [array.copy() for array in arrays])
    y, kept = (ours["linear_tet2"](x, w, None) for w in (prepared, again))
    assert np.array_equal(device.to_host(y), device.to_host(kept))
