"""The core's conformance kit, for this communicator."""

from fastdeploy_testing.conformance.test_expert_communicator import ExpertCommunicatorConformance


class TestMyMesh(ExpertCommunicatorConformance):
    kind = "expert_communicator"
    driver_name = "mymesh"
    runs_on = "cpu"
