"""The conformance kit on every parser."""

from __future__ import annotations

from test_formats import ANSWERS

from fastdeploy_testing.conformance.test_hygiene import HygieneConformance
from fastdeploy_testing.conformance.test_stream_parser import StreamParserConformance


def written(*names: str) -> tuple[str, ...]:
    """Answers in the published form, with calls of the kit's function and without ids."""
    texts = [ANSWERS[name][1].replace("[CALL_ID]abcdefghi", "") for name in names]
    return tuple(t.replace("get_weather", "f").replace("get_time", "f") for t in texts)


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
    samples = written("hermes")


class TestDeepSeekTools(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "deepseek"
    samples = written("deepseek_v3", "deepseek_v31")


class TestDeepSeekV32(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "deepseek_v32"
    samples = written("deepseek_v32")


class TestKimiK2(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "kimi_k2"
    samples = written("kimi_k2")


class TestMistral(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "mistral"
    samples = written("mistral from v11")


class TestLlama3(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "llama3_json"
    samples = written("llama3_json")


class TestPythonic(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "pythonic"
    samples = written("pythonic", "llama4_pythonic")


class TestQwen3Coder(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "qwen3_coder"
    samples = written("qwen3_coder", "qwen3_coder without a group")


class TestQwen(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "qwen3_moe"
    samples = written("qwen3_moe", "hermes", "qwen3_coder")


class TestGlm(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "glm45"
    samples = written("glm45", "glm47")


class TestMiniMaxM2(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "minimax_m2"
    samples = written("minimax_m2")


class TestGemma4(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "gemma4"
    samples = written("gemma4")


class TestFunctionGemma(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "functiongemma"
    samples = written("functiongemma")


class TestGranite(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "granite"
    samples = written("granite")


class TestPhi4Mini(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "phi4_mini_json"
    samples = written("phi4_mini_json")


class TestOpenAITools(StreamParserConformance):
    kind = "tool_parser"
    driver_name = "openai"


class TestHygiene(HygieneConformance):
    kind = "tool_parser"
    driver_name = "hermes"
