"""The core's conformance kit, for this device."""

from fastdeploy_testing.conformance.test_attention import AttentionConformance
from fastdeploy_testing.conformance.test_device import DeviceConformance
from fastdeploy_testing.conformance.test_ops import OpsConformance


class TestMyChip(DeviceConformance):
    driver_name = "mychip"


class TestMyChipKernels(OpsConformance):
    driver_name = "mychip"


class TestMyChipAttention(AttentionConformance):
    runs_on = "mychip"
