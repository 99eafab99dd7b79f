"""The core's whole conformance kit on a simulated device of this vendor's type name."""

import pytest

from fastdeploy_testing.conformance.test_attention import AttentionConformance
from fastdeploy_testing.conformance.test_device import DeviceConformance
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_kv_formats import KVFormatConformance
from fastdeploy_testing.conformance.test_moe import MoEConformance
from fastdeploy_testing.conformance.test_ops import OpsConformance
from fastdeploy_testing.conformance.test_quantized_ops import QuantizedOpsConformance

pytestmark = pytest.mark.usefixtures("simulated")


class TestXpuHygiene(HygieneConformance):
    kind, driver_name = "device", "xpu"


class TestXpu(DeviceConformance):
    driver_name = "xpu"


@pytest.mark.slow
class TestXpuKernels(OpsConformance):
    driver_name = "xpu"


@pytest.mark.slow
class TestXpuQuantizedKernels(QuantizedOpsConformance):
    driver_name = "xpu"


@pytest.mark.slow
class TestXpuWithReferenceAttention(AttentionConformance):
    driver_name, runs_on = "reference", "xpu"


@pytest.mark.slow
class TestXpuWithReferenceKVFormats(KVFormatConformance):
    driver_name, runs_on = "reference", "xpu"


@pytest.mark.slow
class TestXpuWithReferenceMoE(MoEConformance):
    driver_name, runs_on = "reference", "xpu"
