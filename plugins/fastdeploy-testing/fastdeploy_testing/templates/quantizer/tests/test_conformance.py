"""The core's conformance kit, for this format."""

import pytest
from fastdeploy_testing.conformance.test_quantizer import QuantizerConformance


class TestMyFormat(QuantizerConformance):
    driver_name = "myformat"

    @pytest.fixture
    def max_relative_error(self) -> float:
        return 0.02
