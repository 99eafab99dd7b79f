"""The conformance kit. Drivers read checkpoints only: without one, their shapes can be tested."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_quantizer import QuantizerConformance

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


class TestGptq(QuantizerConformance):
    driver_name = "gptq"

    @pytest.fixture
    def quantization_config(self) -> dict[str, Any]:
        return {"bits": 4, "group_size": 32}


class TestAwq(QuantizerConformance):
    driver_name = "awq"

    @pytest.fixture
    def quantization_config(self) -> dict[str, Any]:
        return {"bits": 4, "group_size": 32}


class TestCompressedTensors(QuantizerConformance):
    driver_name = "compressed-tensors"

    @pytest.fixture
    def quantization_config(self) -> dict[str, Any]:
        return {"config_groups": {"a": {"targets": ["Linear"], "weights": INT4}}}


class TestHygiene(HygieneConformance):
    kind = "quantizer"
    driver_name = "gptq"
