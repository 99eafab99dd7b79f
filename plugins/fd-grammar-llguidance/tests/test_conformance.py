"""The conformance kit's checks of any plugin."""

from __future__ import annotations

from fastdeploy_testing.conformance.test_hygiene import HygieneConformance


class TestHygiene(HygieneConformance):
    kind = "grammar"
    driver_name = "llguidance"
