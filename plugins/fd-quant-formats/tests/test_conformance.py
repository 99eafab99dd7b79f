"""The conformance kit, on every driver that packs weights while loading."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_quantizer import QuantizerConformance


class TestWInt8(QuantizerConformance):
    driver_name = "wint8"

    @pytest.fixture
    def max_relative_error(self) -> float:
        return 0.02


class TestWInt4(QuantizerConformance):
    driver_name = "wint4"


class TestW8A8(QuantizerConformance):
    driver_name = "w8a8"

    @pytest.fixture
    def max_relative_error(self) -> float:
        return 0.03


class TestW4A8(QuantizerConformance):
    driver_name = "w4a8"


class TestMixed(QuantizerConformance):
    driver_name = "mix_quant"

    @pytest.fixture
    def quantization_config(self) -> dict[str, Any]:
        return {"dense_quant_type": "wint8", "moe_quant_type": "wint4"}


class TestBlockFp8(QuantizerConformance):
    driver_name = "block_wise_fp8"

    @pytest.fixture
    def max_relative_error(self) -> float:
        return 0.08


class TestWFp8AFp8(QuantizerConformance):
    driver_name = "wfp8afp8"

    @pytest.fixture
    def max_relative_error(self) -> float:
        return 0.08


class TestHygiene(HygieneConformance):
    kind = "quantizer"
    driver_name = "wint8"
