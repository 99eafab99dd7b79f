"""The core's conformance kit on a simulated device of this vendor's type name."""

import pytest

from fastdeploy_core.testing.conformance.test_attention import AttentionConformance
from fastdeploy_core.testing.conformance.test_device import DeviceConformance
from fastdeploy_core.testing.conformance.test_ops import OpsConformance

pytestmark = pytest.mark.usefixtures("simulated")


class TestXpu(DeviceConformance):
    driver_name = "xpu"


@pytest.mark.slow
class TestXpuKernels(OpsConformance):
    driver_name = "xpu"


@pytest.mark.slow
class TestXpuWithReferenceAttention(AttentionConformance):
    driver_name = "reference"
    runs_on = "xpu"
