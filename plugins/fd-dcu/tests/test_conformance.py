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


class TestDcuHygiene(HygieneConformance):
    kind, driver_name = "device", "dcu"


class TestDcu(DeviceConformance):
    driver_name = "dcu"


@pytest.mark.slow
class TestDcuKernels(OpsConformance):
    driver_name = "dcu"


@pytest.mark.slow
class TestDcuQuantizedKernels(QuantizedOpsConformance):
    driver_name = "dcu"


@pytest.mark.slow
class TestDcuWithReferenceAttention(AttentionConformance):
    driver_name, runs_on = "reference", "dcu"


@pytest.mark.slow
class TestDcuWithReferenceKVFormats(KVFormatConformance):
    driver_name, runs_on = "reference", "dcu"


@pytest.mark.slow
class TestDcuWithReferenceMoE(MoEConformance):
    driver_name, runs_on = "reference", "dcu"
