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


class TestIluvatarHygiene(HygieneConformance):
    kind, driver_name = "device", "iluvatar"


class TestIluvatar(DeviceConformance):
    driver_name = "iluvatar"


@pytest.mark.slow
class TestIluvatarKernels(OpsConformance):
    driver_name = "iluvatar"


@pytest.mark.slow
class TestIluvatarQuantizedKernels(QuantizedOpsConformance):
    driver_name = "iluvatar"


@pytest.mark.slow
class TestIluvatarWithReferenceAttention(AttentionConformance):
    driver_name, runs_on = "reference", "iluvatar"


@pytest.mark.slow
class TestIluvatarWithReferenceKVFormats(KVFormatConformance):
    driver_name, runs_on = "reference", "iluvatar"


@pytest.mark.slow
class TestIluvatarWithReferenceMoE(MoEConformance):
    driver_name, runs_on = "reference", "iluvatar"
