"""The core's conformance kit, for this processor."""

from fastdeploy_testing.conformance.test_logits_processor import LogitsProcessorConformance


class TestMyBias(LogitsProcessorConformance):
    kind = "logits_processor"
    driver_name = "mybias"
    arguments = ({"mybias": [1, 2]}, {"mybias": [60]})
