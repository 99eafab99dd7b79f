"""The vendor's fused experts are called with what they want; recorded by a stand-in in numpy."""

import pytest
from fd_gaudi.device import GaudiDevice
from fd_gaudi.moe import GaudiMoE
from fd_gaudi.operators import OPERATORS, answer_moe
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

from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_testing import oracle

pytestmark = pytest.mark.usefixtures("simulated")


class Operators(StandIn):
    """As FastDeploy 2.x called it."""

    def fused_gate_moe(
        self, x, router, bias, gate_up, down, top_k, *, norm_topk_prob, permuted_weights,
        activation,
        experts_min, experts_max, chunk_size,
    ):  # fmt: skip
        self.count("experts")
        check(x, "bfloat16", None, HIDDEN)
        check(router, "float32", HIDDEN, EXPERTS)
        check(bias, "float32", EXPERTS)
        check(gate_up, "bfloat16", EXPERTS, HIDDEN, 2 * WIDTH)
        check(down, "bfloat16", EXPERTS, WIDTH, HIDDEN)
        assert norm_topk_prob and not permuted_weights and activation == "silu" and chunk_size == 64
        assert (experts_min, experts_max, top_k) == (0, EXPERTS - 1, TOP_K)
        ids, weights = oracle.moe_routing(read(x) @ read(router), read(bias), gate_spec().routing)
        matrices = [read(w).transpose(0, 2, 1) for w in (gate_up, down)]
        return like(x, oracle.moe_experts(read(x), ids, weights, *matrices))


def test_experts_with_their_router_equal_the_oracle():
    device = GaudiDevice(DeviceOptions())
    check_gate_driver(device, GaudiMoE, OPERATORS, Operators())
    device.close()


def test_driver_answers_with_its_reason():
    check_gate_answers(answer_moe, "gaudi", OPERATORS, Operators())
