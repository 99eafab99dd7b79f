"""A whole engine on the simulated device, alone and with two ranks."""

import pytest

from fastdeploy_testing.conformance.test_end_to_end import EndToEndConformance

pytestmark = [pytest.mark.usefixtures("simulated"), pytest.mark.slow]


class TestIluvatarEndToEnd(EndToEndConformance):
    driver_name = "iluvatar"
