"""The core's conformance kit, for this driver."""

from fastdeploy_testing.conformance.test_attention import AttentionConformance


class TestMyFlash(AttentionConformance):
    kind = "attention"
    driver_name = "myflash"
    runs_on = "cpu"
