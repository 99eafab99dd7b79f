"""The conformance kit on this backend."""

from __future__ import annotations

from fastdeploy_testing.conformance.test_grammar import GrammarConformance
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance


class TestLLGuidance(GrammarConformance):
    driver_name = "llguidance"
    kinds = ("choice", "regex", "json", "grammar")


class TestHygiene(HygieneConformance):
    kind = "grammar"
    driver_name = "llguidance"
