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


class TestGcuHygiene(HygieneConformance):
    kind, driver_name = "device", "gcu"


class TestGcu(DeviceConformance):
    driver_name = "gcu"


@pytest.mark.slow
class TestGcuKernels(OpsConformance):
    driver_name = "gcu"


@pytest.mark.slow
class TestGcuQuantizedKernels(QuantizedOpsConformance):
    driver_name = "gcu"


@pytest.mark.slow
class TestGcuWithReferenceAttention(AttentionConformance):
    driver_name, runs_on = "reference", "gcu"


@pytest.mark.slow
class TestGcuWithReferenceKVFormats(KVFormatConformance):
    driver_name, runs_on = "reference", "gcu"


@pytest.mark.slow
class TestGcuWithReferenceMoE(MoEConformance):
    driver_name, runs_on = "reference", "gcu"
