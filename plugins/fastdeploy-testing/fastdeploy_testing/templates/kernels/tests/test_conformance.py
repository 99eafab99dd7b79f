"""Every cell of the table against the core's own oracle."""

from fastdeploy_testing.conformance.test_ops import OpsConformance


class TestMyOps(OpsConformance):
    kind = "kernels"
    driver_name = "myops"
