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


class TestMetaxHygiene(HygieneConformance):
    kind, driver_name = "device", "metax"


class TestMetax(DeviceConformance):
    driver_name = "metax"


@pytest.mark.slow
class TestMetaxKernels(OpsConformance):
    driver_name = "metax"


@pytest.mark.slow
class TestMetaxQuantizedKernels(QuantizedOpsConformance):
    driver_name = "metax"


@pytest.mark.slow
class TestMetaxWithReferenceAttention(AttentionConformance):
    driver_name, runs_on = "reference", "metax"


@pytest.mark.slow
class TestMetaxWithReferenceKVFormats(KVFormatConformance):
    driver_name, runs_on = "reference", "metax"


@pytest.mark.slow
class TestMetaxWithReferenceMoE(MoEConformance):
    driver_name, runs_on = "reference", "metax"
