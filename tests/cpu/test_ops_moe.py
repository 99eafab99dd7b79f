"""Routing and experts against transformers' modules and a loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_core import tensor
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.reference.moe import ReferenceMoE
from fastdeploy_core.reference.ops import moe as ops
from tests.torch_oracle import ask

HIDDEN, EXPERTS = 24, 16


@pytest.fixture(scope="module")
def xp(tensor_library):
    return tensor.load(tensor_library)


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((50, HIDDEN)).astype(np.float32),
        "weight": rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32),
        "bias": (rng.standard_normal(EXPERTS) * 0.2).astype(np.float32),
    }


def compare(xp, answer, bias, spec):
    logits = xp.tensor(answer["logits"])
    ids, weights = ops.moe_routing(logits, None if bias is None else xp.tensor(bias), spec)
    ids, weights = xp.to_numpy(ids), xp.to_numpy(weights)
    assert ids.dtype == np.int64 and weights.dtype == np.float32
    # The order of the chosen experts is open.
    ours, theirs = np.argsort(ids, 1), np.argsort(answer["ids"], 1)
    assert np.array_equal(
        np.take_along_axis(ids, ours, 1), np.take_along_axis(answer["ids"], theirs, 1)
    )
    np.testing.assert_allclose(
        np.take_along_axis(weights, ours, 1),
        np.take_along_axis(answer["weights"], theirs, 1),
        rtol=2e-6,
    )


def test_ernie_routing_with_correction_bias(xp, inputs, tmp_path):
    answer = ask("ernie_router", tmp_path, **inputs, top_k=np.array(3))
    spec = RoutingSpec(EXPERTS, 3, has_correction_bias=True)
    compare(xp, answer, inputs["bias"], spec)
    without, _ = ops.moe_routing(xp.tensor(answer["logits"]), None, spec)
    changed = np.sort(xp.to_numpy(without), 1) != np.sort(answer["ids"], 1)
    assert changed.any(), "the bias changes nothing: the test proves nothing"


@pytest.mark.parametrize("renormalize", [True, False])
def test_qwen_routing(xp, inputs, tmp_path, renormalize):
    del inputs["bias"]
    answer = ask(
        "qwen_router", tmp_path, **inputs, top_k=np.array(4), renormalize=np.array(renormalize)
    )
    compare(xp, answer, None, RoutingSpec(EXPERTS, 4, renormalize=renormalize))


@pytest.mark.parametrize("groups, top_k_groups", [(4, 2), (8, 3), (1, 1)])
def test_deepseek_routing_in_groups(xp, inputs, tmp_path, groups, top_k_groups):
    answer = ask(
        "deepseek_router",
        tmp_path,
        **inputs,
        top_k=np.array(3),
        groups=np.array(groups),
        top_k_groups=np.array(top_k_groups),
        scaling=np.array(2.5),
    )
    spec = RoutingSpec(
        EXPERTS, 3, "sigmoid", True, 2.5, groups, top_k_groups, has_correction_bias=True
    )
    compare(xp, answer, inputs["bias"], spec)


def expert_inputs(tokens, experts, top_k, seed=0, uneven=False):
    rng = np.random.default_rng(seed)
    hidden, width = 16, 12
    if uneven:
        ids = np.tile(np.arange(top_k), (tokens, 1))
    else:
        ids = np.argsort(rng.random((tokens, experts)), 1)[:, :top_k]
    return {
        "x": rng.standard_normal((tokens, hidden)).astype(np.float32),
        "ids": np.ascontiguousarray(ids),
        "weights": rng.random((tokens, top_k)).astype(np.float32),
        "gate_up": rng.standard_normal((experts, 2 * width, hidden)).astype(np.float32) / 4,
        "down": rng.standard_normal((experts, hidden, width)).astype(np.float32) / 4,
    }


def by_loop(x, ids, weights, gate_up, down):
    y = np.zeros(x.shape)
    for token in range(len(x)):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            gate, up = np.split(gate_up[expert].astype(np.float64) @ x[token], 2)
            y[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return y


def run(xp, arrays, dtype="float32"):
    names = ("x", "ids", "weights", "gate_up", "down")
    x, ids, weights, *rest = (xp.tensor(arrays[name]) for name in names)
    x, *rest = (t.to(xp.dtype(dtype)) for t in (x, *rest))
    y = ops.moe_experts(x, ids, weights, *rest)
    assert xp.dtype_name(y) == dtype
    return xp.to_numpy(y.to(xp.float32))


@pytest.mark.parametrize(
    "tokens, experts, top_k, uneven",
    [
        (1, 8, 2, False),  # few experts active: one by one
        (30, 8, 2, False),  # all together
        (200, 8, 2, False),  # more rows than are computed together
        (30, 64, 4, False),
        (9, 8, 3, True),  # every token visits the same experts
        (5, 1, 1, False),
    ],
)
def test_experts_equal_a_loop_over_tokens(xp, tokens, experts, top_k, uneven):
    arrays = expert_inputs(tokens, experts, top_k, uneven=uneven)
    np.testing.assert_allclose(run(xp, arrays), by_loop(**arrays), rtol=1e-4, atol=1e-5)


def test_experts_equal_transformers(xp, tmp_path):
    arrays = expert_inputs(40, 8, 2, seed=3)
    expected = ask("experts", tmp_path, **arrays)["y"]
    np.testing.assert_allclose(run(xp, arrays), expected, rtol=1e-4, atol=1e-5)


def test_both_ways_of_computing_agree(xp):
    arrays = expert_inputs(30, 8, 2)
    together = run(xp, arrays)
    original = ops._MAX_TOGETHER
    ops._MAX_TOGETHER = 0
    try:
        single = run(xp, arrays)
    finally:
        ops._MAX_TOGETHER = original
    np.testing.assert_allclose(together, single, rtol=1e-5, atol=1e-6)
    assert ops._is_even(np.array([4, 4, 3, 5]), 16) and not ops._is_even(np.array([16, 0, 0, 0]), 3)


def test_a_token_does_not_depend_on_the_others(xp):
    arrays = expert_inputs(30, 8, 2)
    whole = run(xp, arrays)
    part = {**arrays, **{n: arrays[n][7:8] for n in ("x", "ids", "weights")}}
    np.testing.assert_allclose(run(xp, part)[0], whole[7], rtol=1e-5, atol=1e-6)


def test_no_tokens(xp):
    arrays = expert_inputs(0, 4, 2)
    assert run(xp, arrays).shape == (0, 16)
    ids, weights = ops.moe_routing(xp.zeros([0, 4]), None, RoutingSpec(4, 2))
    assert list(ids.shape) == list(weights.shape) == [0, 2]


def test_narrow_floats_are_summed_in_float32(xp):
    if "bfloat16" not in xp.cpu_matmul_dtypes:
        pytest.skip(f"{xp.name} multiplies no bfloat16 on a CPU")
    arrays = expert_inputs(30, 8, 2)
    np.testing.assert_allclose(run(xp, arrays, "bfloat16"), by_loop(**arrays), atol=0.03)


def test_driver_routes_unless_told_where_to_go(tensor_library):
    device = CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))
    xp = device.xp
    arrays = expert_inputs(6, 8, 2)
    spec = RoutingSpec(8, 2)
    kernels = {"moe_routing": ops.moe_routing, "moe_experts": ops.moe_experts}
    driver = ReferenceMoE(MoESpec(spec, 16, 12, "float32"), device, kernels)
    weights = driver.prepare_weights(xp.tensor(arrays["gate_up"]), xp.tensor(arrays["down"]))
    logits = xp.tensor(np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32))
    x = xp.tensor(arrays["x"])
    routed = driver.forward(x, weights, logits, None, None, None)
    told = driver.forward(x, weights, logits, None, *ops.moe_routing(logits, None, spec))
    assert np.array_equal(xp.to_numpy(routed), xp.to_numpy(told))
