"""The core's conformance kit, for this launcher."""

from fastdeploy_testing.conformance.test_launcher import LauncherConformance


class TestMyCluster(LauncherConformance):
    kind = "launcher"
    driver_name = "mycluster"
    options = {"run": "env FD_MYCLUSTER=1"}
