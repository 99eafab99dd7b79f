"""The vendor's fused experts are called with what they want; recorded by a stand-in in numpy."""

import numpy as np
import pytest
from fd_simdevice.stand_in import StandIn, check, like, read, standing_in
from fd_xpu.device import XpuDevice
from fd_xpu.moe import XpuMoE
from fd_xpu.operators import OPERATORS, answer_moe

from fastdeploy_core.contracts.base import Accept, Decline
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.moe import MoEQuestion, MoESpec, RoutingSpec
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.testing import oracle

pytestmark = pytest.mark.usefixtures("simulated")
EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 2, 8, 12


def spec(**routing):
    routing = RoutingSpec(EXPERTS, TOP_K, has_correction_bias=True, **routing)
    return MoESpec(routing, HIDDEN, WIDTH, "bfloat16")


class Operators(StandIn):
    """As FastDeploy 2.x called it."""

    def xpu_moe_layer(
        self, x, router, bias, gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale,
        in_scale, algorithm, top_k, grouped,
    ):  # fmt: skip
        self.count("experts")
        check(x, "bfloat16", None, HIDDEN)
        check(router, "float32", EXPERTS, HIDDEN)
        check(bias, "float32", EXPERTS)
        check(gate_up, "bfloat16", EXPERTS, 2 * WIDTH, HIDDEN)
        check(down, "bfloat16", EXPERTS, HIDDEN, WIDTH)
        unused = (gate_up_bias, down_bias, gate_up_scale, down_scale, in_scale)
        assert unused == (None,) * 5 and (algorithm, top_k, grouped) == ("w16a16", TOP_K, False)
        ids, weights = oracle.moe_routing(read(x) @ read(router).T, read(bias), spec().routing)
        return like(x, oracle.moe_experts(read(x), ids, weights, read(gate_up), read(down)))


def test_experts_with_their_router_equal_the_oracle():
    device, rng = XpuDevice(DeviceOptions()), np.random.default_rng(0)

    def tensor(*shape, dtype="bfloat16"):
        array = rng.standard_normal(shape).astype("float32")
        return device.to_device(array).to(device.xp.dtype(dtype))

    x, gate_up, down = tensor(5, HIDDEN), tensor(4, 2 * WIDTH, HIDDEN), tensor(4, HIDDEN, WIDTH)
    router, bias = tensor(EXPERTS, HIDDEN, dtype="float32"), tensor(EXPERTS, dtype="float32")
    with device.xp.no_grad(), standing_in(OPERATORS, Operators()) as operators:
        driver = XpuMoE(spec(), device, build_kernel_table("xpu"))
        weights = driver.prepare_weights(gate_up, down)
        got = driver.forward_gate(x, weights, router, bias)
    logits = read(x) @ read(router).T
    ids, chosen = oracle.moe_routing(logits, read(bias), spec().routing)
    expected = oracle.moe_experts(read(x), ids, chosen, read(gate_up), read(down))
    assert np.allclose(read(got), expected, rtol=0.05, atol=0.05 * np.abs(expected).max())
    assert operators.calls == {"experts": 1}
    device.close()


def test_driver_answers_with_its_reason():
    def ask(device="xpu", quantization="", **routing):
        question = MoEQuestion(device, "paddle", spec(**routing), quantization)
        return answer_moe(question).verdict

    missing = ask()
    assert isinstance(missing, Decline) and "not installed" in missing.reason
    with standing_in(OPERATORS, Operators()):
        assert isinstance(ask(), Accept)
        for changed in (
            {"device": "cpu"},
            {"quantization": "wint8"},
            {"scoring": "sigmoid"},
            {"num_groups": 2},
            {"renormalize": False},
        ):
            assert isinstance(ask(**changed), Decline), changed
