"""What drivers and cells made of vendors' expert operators must do, checked over stand-ins for
these."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.moe import MoEQuestion, MoESpec, RoutingSpec
from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight
from fastdeploy_testing import oracle
from fastdeploy_testing.drivers import build_kernel_table

from .stand_in import StandIn, read, standing_in

if TYPE_CHECKING:
    from fd_accelerator.vendor_operators import VendorOperators

    from fastdeploy_core.contracts.device import DeviceBackend

EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 2, 8, 12


def gate_spec(**routing: Any) -> MoESpec:
    """A layer of the sizes above whose router is the operator's, too."""
    return MoESpec(
        RoutingSpec(EXPERTS, TOP_K, has_correction_bias=True, **routing), HIDDEN, WIDTH, "bfloat16"
    )


def check_gate_driver(
    device: DeviceBackend, driver: Any, operators: VendorOperators, module: StandIn
) -> None:
    """Router and experts in one operator, called once, equal the oracle."""
    rng = np.random.default_rng(0)

    def tensor(*shape: int, dtype: str = "bfloat16") -> Any:
        array = rng.standard_normal(shape).astype("float32")
        return device.to_device(array).to(device.xp.dtype(dtype))

    x, gate_up, down = tensor(5, HIDDEN), tensor(4, 2 * WIDTH, HIDDEN), tensor(4, HIDDEN, WIDTH)
    router, bias = tensor(EXPERTS, HIDDEN, dtype="float32"), tensor(EXPERTS, dtype="float32")
    spec = gate_spec()
    with device.xp.no_grad(), standing_in(operators, module):
        layer = driver(spec, device, build_kernel_table(device.name))
        got = layer.forward_gate(x, layer.prepare_weights(gate_up, down), router, bias)
    ids, weights = oracle.moe_routing(read(x) @ read(router).T, read(bias), spec.routing)
    _check_close(got, oracle.moe_experts(read(x), ids, weights, read(gate_up), read(down)))
    assert module.calls == {"experts": 1}


def check_gate_answers(
    answer: Callable[[MoEQuestion], Candidate],
    device: str,
    operators: VendorOperators,
    module: StandIn,
) -> None:
    """Taken with the operators installed, and only for what they can do."""

    def ask(device: str = device, quantization: str = "", **routing: Any) -> Any:
        return answer(MoEQuestion(device, "paddle", gate_spec(**routing), quantization)).verdict

    missing = ask()
    assert isinstance(missing, Decline) and "not installed" in missing.reason
    with standing_in(operators, module):
        assert isinstance(ask(), Accept)
        for changed in (
            {"device": "cpu"},
            {"quantization": "wint8"},
            {"scoring": "sigmoid"},
            {"num_groups": 2},
            {"renormalize": False},
        ):
            assert isinstance(ask(**changed), Decline), changed


def check_int8_cell(
    device: DeviceBackend, operators: VendorOperators, module: StandIn, distribution: str
) -> None:
    """The table has the distribution's cell, whose three operators, called once each, equal the
    oracle."""
    rng = np.random.default_rng(3)

    def packed(outputs: int, inputs: int) -> tuple[PackedWeight, np.ndarray]:
        numbers = rng.integers(-127, 128, (EXPERTS, outputs, inputs)).astype("int8")
        scale = (rng.random((EXPERTS, outputs, 1)) * 0.01 + 0.001).astype("float32")
        tensors = {"weight": device.to_device(numbers), "scale": device.to_device(scale)}
        weight = PackedWeight(FORMATS["wint8"], outputs, inputs, tensors, num_experts=EXPERTS)
        return weight, numbers * scale

    with device.xp.no_grad(), standing_in(operators, module):
        table = build_kernel_table(device.name, {"dtype": "bfloat16"})
        origins = table.origins()
        assert origins["moe_experts_wint8"] == distribution
        assert origins["rms_norm"] == "fastdeploy-core"
        (gate_up, first), (down, second) = packed(2 * WIDTH, HIDDEN), packed(HIDDEN, WIDTH)
        x = device.to_device(rng.standard_normal((5, HIDDEN)).astype("float32"))
        x = x.to(device.xp.bfloat16)
        ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(5)])
        weights = rng.random((5, TOP_K)).astype("float32")
        cell, put = table["moe_experts_wint8"], device.to_device
        got = cell(x, put(ids), put(weights), gate_up, down)
        _check_close(got, oracle.moe_experts(read(x), ids, weights, first, second))
    assert module.calls == {"dispatch": 1, "ffn": 1, "reduce": 1}


def _check_close(got: Any, expected: np.ndarray) -> None:
    assert np.allclose(read(got), expected, rtol=0.05, atol=0.05 * np.abs(expected).max())
