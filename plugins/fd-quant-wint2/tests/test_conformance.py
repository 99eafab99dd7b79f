"""The core's conformance kit, for the quantizers of this distribution."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from fastdeploy_core.contracts.quantizer import LayerSpec
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_quantizer import QuantizerConformance


class _QuantizedOnce(QuantizerConformance):
    """Searching the best path of every strand of weights takes a while, so each layer is quantized
    once for all tests."""

    _made: ClassVar[dict[tuple[str, LayerSpec], dict[str, Any]]] = {}

    def _quantized(self, device: Any, quantizer: Any, layer: LayerSpec) -> dict[str, Any]:
        key = type(self).__name__, layer
        if key not in self._made:
            self._made[key] = super()._quantized(device, quantizer, layer)
        return {name: tensor.clone() for name, tensor in self._made[key].items()}


class _Dense(_QuantizedOnce):
    @pytest.fixture
    def quantization_config(self) -> dict[str, Any]:
        return {"dense": True}


class TestTet2(_Dense):
    driver_name = "tet2"


class TestTet2OfExperts(_QuantizedOnce):
    """As `fastdeploy plugins check tet2` does it."""

    driver_name = "tet2"


class TestTet4(_Dense):
    driver_name = "tet4"

    @pytest.fixture
    def max_relative_error(self) -> float:
        return 0.12


class TestWint2(_QuantizedOnce):
    driver_name = "wint2"

    @pytest.fixture
    def max_relative_error(self, layer: LayerSpec) -> float:
        return 0.3 if layer.role == "experts" else 0.02  # two bits, and wint8


class TestHygiene(HygieneConformance):
    kind = "quantizer"
    driver_name = "wint2"
