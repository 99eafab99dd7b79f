"""The core's conformance kit, for this driver."""

from fastdeploy_testing.conformance.test_moe import MoEConformance


class TestMyExperts(MoEConformance):
    kind = "moe"
    driver_name = "myexperts"
    runs_on = "cpu"
