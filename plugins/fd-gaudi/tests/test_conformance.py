"""The core's conformance kit on a simulated device of this vendor's type name."""

import pytest

from fastdeploy_core.testing.conformance.test_attention import AttentionConformance
from fastdeploy_core.testing.conformance.test_device import DeviceConformance
from fastdeploy_core.testing.conformance.test_ops import OpsConformance

pytestmark = pytest.mark.usefixtures("simulated")


class TestGaudi(DeviceConformance):
    driver_name = "gaudi"


@pytest.mark.slow
class TestGaudiKernels(OpsConformance):
    driver_name = "gaudi"


@pytest.mark.slow
class TestGaudiWithReferenceAttention(AttentionConformance):
    driver_name = "reference"
    runs_on = "gaudi"
