"""The core's conformance kit, for this backend."""

from fastdeploy_testing.conformance.test_grammar import GrammarConformance


class TestMyGrammar(GrammarConformance):
    kind = "grammar"
    driver_name = "mygrammar"
    kinds = ("choice",)
