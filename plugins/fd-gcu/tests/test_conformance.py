"""The core's conformance kit, for this device."""

from fastdeploy_core.testing.conformance.test_attention import AttentionConformance
from fastdeploy_core.testing.conformance.test_device import DeviceConformance
from fastdeploy_core.testing.conformance.test_ops import OpsConformance


class TestGcu(DeviceConformance):
    driver_name = "gcu"


class TestGcuKernels(OpsConformance):
    driver_name = "gcu"


class TestGcuAttention(AttentionConformance):
    runs_on = "gcu"
