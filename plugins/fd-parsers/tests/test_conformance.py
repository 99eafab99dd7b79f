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


class TestOpenAI(StreamParserConformance):
    kind = "reasoning_parser"
    driver_name = "openai_gptoss"


class TestErnieX1(StreamParserConformance):
    kind = "reasoning_parser"
    driver_name = "ernie-x1"


class TestHermes(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "hermes"


class TestDeepSeekTools(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "deepseek"


class TestDeepSeekV32(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "deepseek_v32"


class TestKimiK2(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "kimi_k2"


class TestMistral(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "mistral"


class TestLlama3(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "llama3_json"


class TestPythonic(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "pythonic"


class TestQwen3Coder(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "qwen3_coder"


class TestGlm(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "glm45"


class TestMiniMaxM2(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "minimax_m2"


class TestGemma4(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "gemma4"


class TestFunctionGemma(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "functiongemma"


class TestGranite(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "granite"


class TestPhi4Mini(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "phi4_mini_json"


class TestOpenAITools(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "openai"


class TestHygiene(HygieneConformance):
    kind = "tool_parser"
    driver_name = "hermes"
