"""The core's conformance kit, for this parser."""

from fastdeploy_testing.conformance.test_stream_parser import StreamParserConformance


class TestMyCalls(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "mycalls"
    samples = ('Let me see. <call>{"name": "f", "arguments": {"q": "</call"}}</call> Done.',)
