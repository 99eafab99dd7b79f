"""The conformance kit, on the expert communicators that serve every device."""

from __future__ import annotations

from fastdeploy_testing.conformance.test_expert_communicator import (
    ExpertCommunicatorConformance,
)


class TestLoopbackExperts(ExpertCommunicatorConformance):
    driver_name = "loopback"


class TestAllGatherExperts(ExpertCommunicatorConformance):
    driver_name = "all_gather"
