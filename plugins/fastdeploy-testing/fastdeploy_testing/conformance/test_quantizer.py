"""A quantizer: shapes as declared, products near the full-precision ones, clear refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.quantizer import LayerSpec, make_quantizer
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.plugins import lookup

from .base import OnDevice, option_value, values

_SETTINGS = "settings of the format are given with --option KEY=VALUE"

LAYERS = (
    LayerSpec("model.layers.0.mlp.up_proj", "linear", 64, 48),
    LayerSpec("model.layers.0.mlp.down_proj", "linear", 128, 64),
    LayerSpec("model.layers.1.self_attn.q_proj", "linear", 64, 64, has_bias=True),
    LayerSpec("model.layers.1.mlp.experts.0.down_proj", "experts", 128, 64),
)


class QuantizerConformance(OnDevice):
    """Online quantization and application; override the two fixtures for a format's own needs.

    A format that only reads checkpoints refuses to quantize; tests that need its tensors are
    skipped.
    """

    kind = "quantizer"

    @pytest.fixture
    def quantization_config(self, fd_options: dict[str, str]) -> dict[str, Any]:
        """What config.json would say: --fd-option; the format's defaults when empty."""
        return {key: option_value(text) for key, text in fd_options.items()}

    @pytest.fixture
    def max_relative_error(self) -> float:
        """Largest error of a product relative to the largest value; two-bit formats need much."""
        return 0.5

    @pytest.fixture
    def quantizer(
        self, driver: Any, device: Any, kernels: Any, quantization_config: dict[str, Any]
    ) -> Any:
        """A fresh instance."""

        def found(name: str) -> Any:
            return lookup("quantizer", name) if name else driver

        try:
            return make_quantizer("", quantization_config, device, kernels, found)
        except Exception as error:
            pytest.fail(f"not made of {quantization_config}: {error!r}; {_SETTINGS}")

    @pytest.fixture(params=LAYERS, ids=lambda s: f"{s.role}-{s.in_features}x{s.out_features}")
    def layer(self, request: pytest.FixtureRequest, quantizer: Any) -> LayerSpec:
        """Every layer of the grid that the format supports."""
        layer: LayerSpec = request.param
        if not quantizer.supports(layer):
            pytest.skip(
                f"supports({layer.role} {layer.in_features} x {layer.out_features}) is False"
            )
        return layer

    @pytest.fixture
    def linear(self, layer: LayerSpec) -> LayerSpec:
        """The layers among them that the format multiplies itself."""
        if layer.role == "experts":
            pytest.skip("experts are multiplied by the MoE driver")
        return layer

    def test_some_layer_is_supported(
        self, device: Any, quantizer: Any, quantization_config: dict[str, Any]
    ) -> None:
        if any(map(quantizer.supports, LAYERS)):
            return
        if not quantization_config:
            # A format that only reads checkpoints may need the settings of one before it supports
            # any layer.
            self._quantized(device, quantizer, LAYERS[0])
        pytest.fail(f"no layer of the grid; {_SETTINGS}")

    def test_tensors_are_as_declared(self, device: Any, quantizer: Any, layer: LayerSpec) -> None:
        declared = quantizer.parameters(layer)
        stored = self._quantized(device, quantizer, layer)
        assert set(stored) <= set(declared), "quantize() makes tensors that parameters() lacks"
        for name, tensor in stored.items():
            assert tuple(tensor.shape) == tuple(declared[name].shape), name
            assert device.xp.dtype_name(tensor.dtype) == declared[name].dtype, name
            shard = declared[name].shard_dim
            assert shard is None or 0 <= shard < len(declared[name].shape), name

    @pytest.mark.parametrize("tokens", [0, 1, 9])
    def test_product_is_near_full_precision(
        self,
        device: Any,
        quantizer: Any,
        linear: LayerSpec,
        tokens: int,
        max_relative_error: float,
    ) -> None:
        prepared = quantizer.prepare(linear, self._quantized(device, quantizer, linear))
        x = values(1, tokens, linear.in_features)
        bias = 9 * values(2, linear.out_features)
        given = self.to_device(device, x)
        given_bias = self.to_device(device, bias) if linear.has_bias else None
        with self.unchanged(device, x=given, bias=given_bias):
            got = quantizer.apply(linear, prepared, given, given_bias)
        weight = self.to_host(device, self._weight(device, linear))
        expected = x.astype("float64") @ weight.T
        if linear.has_bias:
            expected = expected + bias
        result = self.to_host(device, got)
        assert result.shape == expected.shape
        if tokens:
            assert np.all(np.isfinite(result))
            worst = float(np.max(np.abs(result - expected)) / np.max(np.abs(expected)))
            assert worst <= max_relative_error, f"relative error {worst:.3f}"

    def test_stored_tensors_give_the_weight_back(
        self, device: Any, quantizer: Any, layer: LayerSpec, max_relative_error: float
    ) -> None:
        weight = self._weight(device, layer)
        stored = self._quantized(device, quantizer, layer)
        got = self.to_host(device, quantizer.dequantize(layer, stored))
        expected = self.to_host(device, weight)
        assert got.shape == expected.shape
        error = float(np.sqrt(((got - expected) ** 2).sum() / (expected**2).sum()))
        assert error <= max_relative_error, f"relative error {error:.3f}"

    def test_same_weight_gives_same_bits(
        self, device: Any, quantizer: Any, layer: LayerSpec
    ) -> None:
        first = self._quantized(device, quantizer, layer)
        second = quantizer.quantize(layer, self._weight(device, layer))
        for name in first:
            assert np.array_equal(
                self.to_host(device, first[name]), self.to_host(device, second[name])
            )

    def test_rows_do_not_influence_each_other(
        self, device: Any, quantizer: Any, linear: LayerSpec
    ) -> None:
        prepared = quantizer.prepare(linear, self._quantized(device, quantizer, linear))
        x = values(1, 5, linear.in_features)
        x[3] *= 1000
        together = self.to_host(
            device, quantizer.apply(linear, prepared, self.to_device(device, x), None)
        )
        alone = self.to_host(
            device, quantizer.apply(linear, prepared, self.to_device(device, x[:1]), None)
        )
        assert np.allclose(together[:1], alone, rtol=1e-3, atol=1e-3)

    def test_one_quantizer_serves_several_layers(
        self, device: Any, quantizer: Any, max_relative_error: float
    ) -> None:
        """It is made once for a model."""
        layers = [x for x in LAYERS if x.role == "linear" and quantizer.supports(x)]
        ready = []
        for layer in layers:
            stored = self._quantized(device, quantizer, layer)
            declared = quantizer.parameters(layer)
            assert all(tuple(declared[n].shape) == tuple(x.shape) for n, x in stored.items())
            weight = self.to_host(device, self._weight(device, layer))
            shown = self.to_host(device, quantizer.dequantize(layer, stored))
            assert np.allclose(shown, weight, atol=max_relative_error * np.max(np.abs(weight)))
            ready.append((layer, quantizer.prepare(layer, stored), weight))
        for layer, prepared, weight in (*ready, *ready[::-1]):
            for seed in (3, 4):
                x = values(seed, 2, layer.in_features)
                got = quantizer.apply(layer, prepared, self.to_device(device, x), None)
                expected = x.astype("float64") @ weight.T
                worst = float(np.max(np.abs(self.to_host(device, got) - expected)))
                assert worst <= max_relative_error * float(np.max(np.abs(expected)))

    def _quantized(self, device: Any, quantizer: Any, layer: LayerSpec) -> dict[str, Any]:
        try:
            stored: dict[str, Any] = quantizer.quantize(layer, self._weight(device, layer))
        except ConfigError as error:
            pytest.skip(f"it quantizes nothing: {error}")
        return stored

    def _weight(self, device: Any, layer: LayerSpec) -> Any:
        return self.to_device(device, values(0, layer.out_features, layer.in_features))


class TestQuantizer(QuantizerConformance):
    """Run by `fastdeploy plugins check`."""
