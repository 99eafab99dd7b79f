"""A mixture-of-experts driver against the numpy oracle: routing, crowds, empty experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.moe import (
    AdaptedMoEBackend,
    MoEBlockBackend,
    MoEQuestion,
    MoESpec,
    RoutingSpec,
)
from fastdeploy_testing import oracle

from .base import OnDevice, values
from .test_ops import ROUTINGS, TOKENS

HIDDEN, INTERMEDIATE = 16, 24


class _Adds:
    """ExpertAdapters that add these."""

    def __init__(self, first: Any, second: Any) -> None:
        self._first, self._second = first, second

    def gate_up(self, y: Any, x: Any, topk_ids: Any) -> Any:
        """Before the activation."""
        return y + self._first

    def down(self, y: Any, x: Any, topk_ids: Any) -> Any:
        """After the second product."""
        return y + self._second


class MoEConformance(OnDevice):
    """forward() over token counts, routing rules and dtypes."""

    kind = "moe"

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize(
        "spec", ROUTINGS, ids=lambda s: f"{s.scoring}-{s.top_k}of{s.num_experts}"
    )
    def test_result_equals_the_oracle(
        self,
        request: pytest.FixtureRequest,
        device: Any,
        kernels: Any,
        dtype: str,
        tokens: int,
        spec: RoutingSpec,
    ) -> None:
        logits = values(0, tokens, spec.num_experts) * 2
        self._check(request, device, kernels, dtype, spec, logits)

    def test_all_tokens_at_one_expert(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, dtype: str
    ) -> None:
        logits = values(0, 20, 8)
        logits[:, 5] += 20
        logits[:, 2] += 10
        self._check(request, device, kernels, dtype, RoutingSpec(8, 2), logits)

    def test_result_of_a_token_does_not_depend_on_the_others(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, dtype: str
    ) -> None:
        spec = RoutingSpec(8, 2)
        logits, x = values(0, 9, 8), values(1, 9, HIDDEN)
        crowd = self._forward(request, device, kernels, dtype, spec, logits, x)
        alone = self._forward(request, device, kernels, dtype, spec, logits[4:5], x[4:5])
        relative, absolute = self.tolerance(dtype)
        difference = np.max(np.abs(crowd[4:5] - alone))
        assert difference <= absolute + relative * np.max(np.abs(alone))

    def test_weights_may_be_used_again(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any
    ) -> None:
        dtype = device.limits.dtypes[0]
        spec, logits, x = RoutingSpec(8, 2), values(0, 5, 8), values(1, 5, HIDDEN)
        backend, prepared = self._prepared(request, device, kernels, dtype, spec)
        results = [
            self._call(device, kernels, backend, prepared, dtype, spec, logits, x) for _ in range(2)
        ]
        assert np.array_equal(results[0], results[1]), "the same call gives another result"

    def test_one_driver_serves_several_layers(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any
    ) -> None:
        """It is made once for all layers of a spec; each has its weights."""
        dtype, spec = device.limits.dtypes[0], RoutingSpec(8, 2)
        backend = self._backend(request, device, kernels, dtype, spec)
        layers = [self._weights(spec), tuple(w[::-1] * 2 for w in self._weights(spec))]
        prepared = [
            backend.prepare_weights(*(self.to_device(device, w, dtype) for w in weights))
            for weights in layers
        ]
        for seed in (1, 7):
            logits, x = values(seed + 1, 5, 8), values(seed, 5, HIDDEN)
            ids, shares = oracle.moe_routing(logits.astype("float64"), None, spec)
            for weights, ready in zip(layers, prepared, strict=True):
                got = self._call(device, kernels, backend, ready, dtype, spec, logits, x)
                rounded = (self.rounded(device, w, dtype) for w in weights)
                tokens = self.rounded(device, x, dtype)
                expected = oracle.moe_experts(tokens, ids, shares, *rounded)
                relative, absolute = self.tolerance(dtype)
                limit = absolute + relative * float(np.max(np.abs(expected)))
                assert float(np.max(np.abs(got - expected))) <= limit

    @pytest.mark.parametrize("tokens", [1, 5, 40])
    @pytest.mark.parametrize("num_shared", [0, 2])
    def test_a_block_is_norm_experts_and_sum(
        self,
        request: pytest.FixtureRequest,
        device: Any,
        kernels: Any,
        dtype: str,
        tokens: int,
        num_shared: int,
    ) -> None:
        """Of drivers that compute whole blocks; shared experts stand after the routed ones."""
        routing = RoutingSpec(8, 2)
        backend = self._backend(request, device, kernels, dtype, routing)
        if not isinstance(backend, MoEBlockBackend):
            pytest.skip(f"driver {backend.name!r} computes no whole blocks")
        spec = MoESpec(routing, HIDDEN, INTERMEDIATE, dtype, num_shared_experts=num_shared)
        backend = type(backend)(spec, device, kernels)
        count = routing.num_experts + num_shared
        gate_up, down = (
            values(2, count, 2 * INTERMEDIATE, HIDDEN),
            values(3, count, HIDDEN, INTERMEDIATE),
        )
        # Experts with nearly equal scores could be ordered otherwise in another precision.
        router, x, gain = values(5, 8, HIDDEN) * 4, values(1, tokens, HIDDEN), values(6, HIDDEN)
        prepared = backend.prepare_weights(
            *(self.to_device(device, w, dtype) for w in (gate_up, down))
        )
        inputs, scale = (self.to_device(device, a, dtype) for a in (x, gain))
        scorer = self.to_device(device, router)
        result = backend.forward_block(inputs, scale, 0.3, scorer, None, prepared)
        got = self.to_host(device, result)
        x, gain, gate_up, down = (self.rounded(device, a, dtype) for a in (x, gain, gate_up, down))
        normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.3) * gain
        normed = self.rounded(device, normed.astype("float32"), dtype)
        ids, weights = oracle.moe_routing(normed @ router.T.astype("float64"), None, routing)
        shared = np.broadcast_to(np.arange(8, count), (tokens, num_shared))
        ids = np.concatenate((ids, shared), 1)
        weights = np.concatenate((weights, np.ones((tokens, num_shared))), 1)
        expected = x + oracle.moe_experts(normed, ids, weights, gate_up, down)
        relative, absolute = self.tolerance(dtype)
        limit = absolute + relative * float(np.max(np.abs(expected)))
        assert float(np.max(np.abs(got - expected))) <= 2 * limit

    @pytest.mark.parametrize("tokens", [1, 5, 40])
    def test_adapters_add_to_both_products(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, dtype: str, tokens: int
    ) -> None:
        """Of drivers that let them: before the activation, and to each expert's result."""
        spec = RoutingSpec(8, 2)
        backend, prepared = self._prepared(request, device, kernels, dtype, spec)
        if not isinstance(backend, AdaptedMoEBackend):
            pytest.skip(f"driver {backend.name!r} lets adapters add nothing")
        x, logits, pairs = values(1, tokens, HIDDEN), values(0, tokens, 8), 2 * tokens
        ids, shares = oracle.moe_routing(logits.astype("float64"), None, spec)
        more = values(5, pairs, 2 * INTERMEDIATE), values(6, pairs, HIDDEN)
        given = self.to_device(device, ids), self.to_device(device, shares.astype("float32"))
        adapters = _Adds(*(self.to_device(device, added, dtype) for added in more))
        rows = self.to_device(device, x, dtype)
        result = backend.forward_adapted(rows, prepared, *given, adapters)
        gate_up, down = (self.rounded(device, w, dtype) for w in self._weights(spec))
        x, first, second = (self.rounded(device, a, dtype) for a in (x, *more))
        expected = np.zeros_like(x)
        for pair, expert in enumerate(ids.reshape(-1)):
            token, nth = divmod(pair, 2)
            gate, up = np.split(gate_up[expert] @ x[token] + first[pair], 2)
            y = down[expert] @ (gate / (1 + np.exp(-gate)) * up) + second[pair]
            expected[token] += shares[token, nth] * y
        relative, absolute = self.tolerance(dtype)
        limit = absolute + relative * float(np.max(np.abs(expected)))
        assert float(np.max(np.abs(self.to_host(device, result) - expected))) <= 2 * limit

    def _check(
        self,
        request: pytest.FixtureRequest,
        device: Any,
        kernels: Any,
        dtype: str,
        spec: RoutingSpec,
        logits: np.ndarray,
    ) -> None:
        x = values(1, len(logits), HIDDEN)
        got = self._forward(request, device, kernels, dtype, spec, logits, x)
        bias = self._bias(spec)
        ids, weights = oracle.moe_routing(
            logits.astype("float64"), None if bias is None else bias.astype("float64"), spec
        )
        gate_up, down = (self.rounded(device, w, dtype) for w in self._weights(spec))
        expected = oracle.moe_experts(self.rounded(device, x, dtype), ids, weights, gate_up, down)
        assert got.shape == expected.shape
        if got.size:
            relative, absolute = self.tolerance(dtype)
            worst = float(np.max(np.abs(got - expected)))
            limit = absolute + relative * float(np.max(np.abs(expected)))
            assert worst <= limit, f"off by {worst:.3g}, at most {limit:.3g} for {dtype}"

    def _forward(
        self,
        request: pytest.FixtureRequest,
        device: Any,
        kernels: Any,
        dtype: str,
        spec: RoutingSpec,
        logits: np.ndarray,
        x: np.ndarray,
    ) -> np.ndarray:
        backend, prepared = self._prepared(request, device, kernels, dtype, spec)
        return self._call(device, kernels, backend, prepared, dtype, spec, logits, x)

    def _prepared(
        self,
        request: pytest.FixtureRequest,
        device: Any,
        kernels: Any,
        dtype: str,
        spec: RoutingSpec,
    ) -> tuple[Any, Any]:
        backend = self._backend(request, device, kernels, dtype, spec)
        gate_up, down = (self.to_device(device, w, dtype) for w in self._weights(spec))
        return backend, backend.prepare_weights(gate_up, down)

    def _call(
        self,
        device: Any,
        kernels: Any,
        backend: Any,
        prepared: Any,
        dtype: str,
        spec: RoutingSpec,
        logits: np.ndarray,
        x: np.ndarray,
    ) -> np.ndarray:
        bias = self._bias(spec)
        on_device = self.to_device(device, logits)
        bias_dev = None if bias is None else self.to_device(device, bias)
        ids = weights = None
        if backend.unit == "experts":
            ids, weights = kernels["moe_routing"](on_device, bias_dev, spec)
        tokens = self.to_device(device, x, dtype)
        with self.unchanged(
            device, x=tokens, logits=on_device, bias=bias_dev, topk_ids=ids, topk_weights=weights
        ):
            result = backend.forward(tokens, prepared, on_device, bias_dev, ids, weights)
        return self.to_host(device, result)

    def _weights(self, spec: RoutingSpec) -> tuple[np.ndarray, np.ndarray]:
        return (
            values(2, spec.num_experts, 2 * INTERMEDIATE, HIDDEN),
            values(3, spec.num_experts, HIDDEN, INTERMEDIATE),
        )

    def _bias(self, spec: RoutingSpec) -> np.ndarray | None:
        return values(4, spec.num_experts) * 0.1 if spec.has_correction_bias else None

    def _backend(
        self,
        request: pytest.FixtureRequest,
        device: Any,
        kernels: Any,
        dtype: str,
        routing: RoutingSpec,
    ) -> Any:
        """The driver under test; for a device under test, the driver that the engine would
        choose."""
        from fastdeploy_core.plugins.discovery import discover
        from fastdeploy_core.plugins.drivers import lookup
        from fastdeploy_core.plugins.manager import hook_manager
        from fastdeploy_core.plugins.negotiate import ask_candidates

        option = request.config.getoption
        asked = self.driver_name or (option("--fd-driver") if option("--fd-kind") == "moe" else "")
        spec = MoESpec(routing, HIDDEN, INTERMEDIATE, dtype)
        question = MoEQuestion(device.name, device.xp.name, spec)
        decision, _ = ask_candidates(
            hook_manager(), discover(), "moe", "fd_moe_backends", question, asked
        )
        if not decision.winner:
            if asked:
                pytest.skip(decision.why)
            pytest.fail(f"no MoE driver for {spec} on {device.name}: {decision.candidates}")
        return lookup("moe", decision.winner)(spec, device, kernels)


class TestMoE(MoEConformance):
    """Run by `fastdeploy plugins check`."""
