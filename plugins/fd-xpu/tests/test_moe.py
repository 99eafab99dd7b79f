"""The vendor's fused experts are called with what they want; recorded by a stand-in in numpy."""

import pytest
from fd_simdevice.expert_cases import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    WIDTH,
    check_gate_answers,
    check_gate_driver,
    gate_spec,
)
from fd_simdevice.stand_in import StandIn, check, like, read
from fd_xpu.device import XpuDevice
from fd_xpu.moe import XpuMoE
from fd_xpu.operators import OPERATORS, answer_moe

from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_testing import oracle

pytestmark = pytest.mark.usefixtures("simulated")


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
        ids, weights = oracle.moe_routing(read(x) @ read(router).T, read(bias), gate_spec().routing)
        return like(x, oracle.moe_experts(read(x), ids, weights, read(gate_up), read(down)))


def test_experts_with_their_router_equal_the_oracle():
    device = XpuDevice(DeviceOptions())
    check_gate_driver(device, XpuMoE, OPERATORS, Operators())
    device.close()


def test_driver_answers_with_its_reason():
    check_gate_answers(answer_moe, "xpu", OPERATORS, Operators())
