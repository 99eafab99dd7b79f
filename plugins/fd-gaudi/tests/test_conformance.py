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


class TestGaudiHygiene(HygieneConformance):
    kind, driver_name = "device", "gaudi"


class TestGaudi(DeviceConformance):
    driver_name = "gaudi"


@pytest.mark.slow
class TestGaudiKernels(OpsConformance):
    driver_name = "gaudi"


@pytest.mark.slow
class TestGaudiQuantizedKernels(QuantizedOpsConformance):
    driver_name = "gaudi"


@pytest.mark.slow
class TestGaudiWithReferenceAttention(AttentionConformance):
    driver_name, runs_on = "reference", "gaudi"


@pytest.mark.slow
class TestGaudiWithReferenceKVFormats(KVFormatConformance):
    driver_name, runs_on = "reference", "gaudi"


@pytest.mark.slow
class TestGaudiWithReferenceMoE(MoEConformance):
    driver_name, runs_on = "reference", "gaudi"
