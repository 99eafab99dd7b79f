"""The core's conformance kit, for the quantizers of this distribution."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_core.contracts.quantizer import LayerSpec
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_quantizer import QuantizerConformance


class _Dense(QuantizerConformance):
    @pytest.fixture
    def quantization_config(self) -> dict[str, Any]:
        return {"dense": True}


class TestTet2(_Dense):
    driver_name = "tet2"


class TestTet2OfExperts(QuantizerConformance):
    """As `fastdeploy plugins check tet2` does it."""

    driver_name = "tet2"


class TestTet4(_Dense):
    driver_name = "tet4"

    @pytest.fixture
    def max_relative_error(self) -> float:
        return 0.12


class TestWint2(QuantizerConformance):
    driver_name = "wint2"

    @pytest.fixture
    def max_relative_error(self, layer: LayerSpec) -> float:
        return 0.3 if layer.role == "experts" else 0.02  # two bits, and wint8


class TestHygiene(HygieneConformance):
    kind = "quantizer"
    driver_name = "wint2"
