"""The conformance kit on driver `plain`."""

from __future__ import annotations

from fastdeploy_testing.conformance.test_state import StateConformance


class TestPlain(StateConformance):
    driver_name = "plain"
