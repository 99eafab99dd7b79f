"""The core's conformance kit, for this driver."""

from fastdeploy_testing.conformance.test_state import StateConformance


class TestMyStates(StateConformance):
    kind = "state"
    driver_name = "mystates"
    runs_on = "cpu"
