"""The conformance kit on every parser."""

from __future__ import annotations

from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_stream_parser import StreamParserConformance


class TestQwen3(StreamParserConformance):
    kind = "reasoning_parser"
    driver_name = "qwen3"


class TestDeepSeekR1(StreamParserConformance):
    kind = "reasoning_parser"
    driver_name = "deepseek-r1"


class TestErnieX1(StreamParserConformance):
    kind = "reasoning_parser"
    driver_name = "ernie-x1"


class TestHermes(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "hermes"


class TestDeepSeekTools(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "deepseek"


class TestHygiene(HygieneConformance):
    kind = "tool_parser"
    driver_name = "hermes"
