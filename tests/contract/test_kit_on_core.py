"""The conformance kit on the core's own drivers, by inheritance, as a plugin's tests would do it.

The device, attention, MoE and kernel suites run on the tensor library of this run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fastdeploy_core.contracts.quantizer import LayerSpec, ParameterSpec
from fastdeploy_testing.conformance.test_attention import AttentionConformance
from fastdeploy_testing.conformance.test_device import DeviceConformance
from fastdeploy_testing.conformance.test_end_to_end import EndToEndConformance
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_kv_formats import KVFormatConformance
from fastdeploy_testing.conformance.test_moe import MoEConformance
from fastdeploy_testing.conformance.test_ops import OpsConformance
from fastdeploy_testing.conformance.test_quantized_ops import QuantizedOpsConformance
from fastdeploy_testing.conformance.test_quantizer import QuantizerConformance
from fastdeploy_testing.conformance.test_request_scheduler import RequestSchedulerConformance


class TestCpu(DeviceConformance):
    driver_name = "cpu"


class TestCpuHygiene(HygieneConformance):
    kind = "device"
    driver_name = "cpu"


class TestCpuKernels(OpsConformance):
    driver_name = "cpu"


class TestCpuEndToEnd(EndToEndConformance):
    driver_name = "cpu"


class TestReferenceAttention(AttentionConformance):
    driver_name = "reference"


class TestReferenceKVFormats(KVFormatConformance):
    driver_name = "reference"


class TestCpuQuantizedKernels(QuantizedOpsConformance):
    driver_name = "cpu"


class TestReferenceMoE(MoEConformance):
    driver_name = "reference"


class TestLocalScheduler(RequestSchedulerConformance):
    driver_name = "local"


class IdentityQuantizer:
    """Keeps full precision; shows the shape of a quantizer with the fewest lines."""

    name = "identity"
    contract = (1, 0)

    def __init__(self, config: Mapping[str, Any], device: Any, kernels: Any) -> None:
        self._linear = kernels["linear"]

    def supports(self, layer: LayerSpec) -> bool:
        return layer.role == "linear"

    def joins(self, layer: LayerSpec) -> bool:
        return True

    def is_stored(self, layer: LayerSpec) -> bool:
        return False

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        shape = (layer.out_features, layer.in_features)
        return {"weight": ParameterSpec(shape, layer.dtype, shard_dim=0)}

    def quantize(self, layer: LayerSpec, weight: Any) -> dict[str, Any]:
        return {"weight": weight}

    def prepare(self, layer: LayerSpec, tensors: dict[str, Any]) -> Any:
        return tensors["weight"]

    def apply(self, layer: LayerSpec, prepared: Any, x: Any, bias: Any) -> Any:
        return self._linear(x, prepared, bias)

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Any]) -> Any:
        return tensors["weight"].float()


class TestIdentityQuantizer(QuantizerConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Any:
        return IdentityQuantizer

    @pytest.fixture
    def max_relative_error(self) -> float:
        return 1e-5
