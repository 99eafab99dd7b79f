"""The core's conformance kit, for this parser."""

from fastdeploy_testing.conformance.test_stream_parser import StreamParserConformance


class TestMyThoughts(StreamParserConformance):
    kind = "reasoning_parser"
    driver_name = "mythoughts"
    samples = ("<think>First, a </ and more.</think>\n\nThe answer is <4>.",)
