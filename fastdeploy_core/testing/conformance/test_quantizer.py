"""A quantizer: shapes as declared, products near the full-precision ones, clear refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.quantizer import LayerSpec

from .base import OnDevice, values

LAYERS = (
    LayerSpec("model.layers.0.mlp.up_proj", "linear", 64, 48),
    LayerSpec("model.layers.0.mlp.down_proj", "linear", 128, 64),
    LayerSpec("model.layers.1.self_attn.q_proj", "linear", 64, 64, has_bias=True),
)


class QuantizerConformance(OnDevice):
    """Online quantization and application; override the two fixtures for a format's own needs."""

    kind = "quantizer"

    @pytest.fixture
    def quantization_config(self) -> dict[str, Any]:
        """What config.json would say; the format's defaults when empty."""
        return {}

    @pytest.fixture
    def max_relative_error(self) -> float:
        """Largest error of a product over the largest value; two-bit formats need much."""
        return 0.5

    @pytest.fixture
    def quantizer(
        self, driver: Any, device: Any, kernels: Any, quantization_config: dict[str, Any]
    ) -> Any:
        """A fresh instance."""
        return driver(quantization_config, device, kernels)

    @pytest.fixture(params=LAYERS, ids=lambda s: f"{s.in_features}x{s.out_features}")
    def layer(self, request: pytest.FixtureRequest, quantizer: Any) -> LayerSpec:
        """Every linear layer of the grid that the format supports."""
        if not quantizer.supports(request.param):
            pytest.skip(
                f"supports({request.param.in_features} x {request.param.out_features}) is False"
            )
        return request.param

    def test_some_layer_is_supported(self, quantizer: Any) -> None:
        assert any(quantizer.supports(layer) for layer in LAYERS), "no layer of the grid"

    def test_tensors_are_as_declared(self, device: Any, quantizer: Any, layer: LayerSpec) -> None:
        declared = quantizer.parameters(layer)
        stored = quantizer.quantize(layer, self._weight(device, layer))
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
        layer: LayerSpec,
        tokens: int,
        max_relative_error: float,
    ) -> None:
        weight = self._weight(device, layer)
        prepared = quantizer.prepare(layer, quantizer.quantize(layer, weight))
        x = values(1, tokens, layer.in_features)
        bias = values(2, layer.out_features)
        got = quantizer.apply(
            layer,
            prepared,
            self.to_device(device, x),
            self.to_device(device, bias) if layer.has_bias else None,
        )
        expected = x.astype("float64") @ self.to_host(device, weight).T
        if layer.has_bias:
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
        got = self.to_host(device, quantizer.dequantize(layer, quantizer.quantize(layer, weight)))
        expected = self.to_host(device, weight)
        assert got.shape == expected.shape
        error = float(np.sqrt(((got - expected) ** 2).sum() / (expected**2).sum()))
        assert error <= max_relative_error, f"relative error {error:.3f}"

    def test_same_weight_gives_same_bits(
        self, device: Any, quantizer: Any, layer: LayerSpec
    ) -> None:
        first, second = (quantizer.quantize(layer, self._weight(device, layer)) for _ in range(2))
        for name in first:
            assert np.array_equal(
                self.to_host(device, first[name]), self.to_host(device, second[name])
            )

    def test_rows_do_not_influence_each_other(
        self, device: Any, quantizer: Any, layer: LayerSpec
    ) -> None:
        prepared = quantizer.prepare(layer, quantizer.quantize(layer, self._weight(device, layer)))
        x = values(1, 5, layer.in_features)
        x[3] *= 1000
        together = self.to_host(
            device, quantizer.apply(layer, prepared, self.to_device(device, x), None)
        )
        alone = self.to_host(
            device, quantizer.apply(layer, prepared, self.to_device(device, x[:1]), None)
        )
        assert np.allclose(together[:1], alone, rtol=1e-3, atol=1e-3)

    def _weight(self, device: Any, layer: LayerSpec) -> Any:
        return self.to_device(device, values(0, layer.out_features, layer.in_features))


class TestQuantizer(QuantizerConformance):
    """Run by `fastdeploy plugins check`."""
