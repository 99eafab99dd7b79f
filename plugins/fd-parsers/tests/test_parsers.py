"""Reasoning and tool parsers: one result for every way of cutting the text, and none is hostile."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import fd_parsers
import pytest
from fd_parsers.deepseek import SEPARATOR, DeepSeekToolParser
from fd_parsers.hermes import HermesToolParser
from fd_parsers.think import DeepSeekR1Parser, ErnieX1Parser, ThinkParser
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import check_linear, cut, run

from fastdeploy_core import plugins
from fastdeploy_core.contracts.small import ReasoningParser, ToolParser
from fastdeploy_core.parsers.answer import AnswerReader, shown_tokens, thinking_ahead

THINKERS = [ThinkParser, DeepSeekR1Parser, ErnieX1Parser]
TOOLS = [HermesToolParser, DeepSeekToolParser]
BEGIN, END = DeepSeekToolParser.start, DeepSeekToolParser.end
GROUP, END_GROUP = DeepSeekToolParser.silent
TRICKY = '{"q": "a </tool_call> \\" } ] 你好 \\\\", "deep": {"x": [1, {"y": {}}]}}'
PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": ' + TRICKY + "}",
    '{"name":"g"}',
    "<think>",
    "</think>",
    "<response>",
    "</response>",
    BEGIN,
    END,
    SEPARATOR,
    GROUP,
    END_GROUP,
    "function",
    "name\n```json\n",
    "\n```",
    '{"a": 1}',
    '"',
    "\\",
    "{",
    "}",
    "<",
    "</tool",
    "\n",
    "\n\n",
    " ",
    "hello",
    "你好",
]
TEXT = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def makers() -> list[Any]:
    made: list[Any] = [lambda kind=kind: kind([]) for kind in TOOLS]
    for kind in THINKERS:
        for prompt in ("", "<think>\n", "<think>\n\n</think>\n\n"):
            made.append(lambda kind=kind, prompt=prompt: kind(prompt, {}))
            made.append(
                lambda kind=kind, prompt=prompt: AnswerReader(
                    kind, HermesToolParser, prompt_text=prompt, tools=[{}]
                )
            )
    return made


@pytest.mark.parametrize("make", makers())
@settings(max_examples=60, deadline=None)
@given(text=TEXT, places=st.lists(st.integers(0, 400), max_size=8))
def test_streaming_equals_non_streaming(make: Any, text: str, places: list[int]) -> None:
    whole = run(make(), [text])
    assert run(make(), cut(text, places)) == whole
    assert run(make(), list(text)) == whole


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_tool_parsers_lose_no_text_when_nothing_is_a_call(text: str) -> None:
    text = text.replace("{", "(")  # so that nothing is valid JSON
    assert run(HermesToolParser([]), [text]) == (text, "", [])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=8), st.text(max_size=20) | st.integers(), max_size=4))
def test_any_arguments_survive(arguments: dict[str, Any]) -> None:
    call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    for text in (call, json.dumps({"name": "f", "arguments": arguments})):
        _, _, calls = run(HermesToolParser([]), list(f"<tool_call>{text}</tool_call>"))
        assert [json.loads(given) for _, _, given in calls] == [arguments]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        (" spaced \n", " spaced \n", []),
        (
            'I look.\n<tool_call>\n{"name": "a", "arguments": ' + TRICKY + "}\n</tool_call>",
            "I look.",
            [(0, "a", TRICKY)],
        ),
        (
            '<tool_call>{"name":"a"}</tool_call>\n<tool_call>{"name":"b","parameters":{"x":1}}'
            "</tool_call>\n",
            "",
            [(0, "a", "{}"), (1, "b", '{"x": 1}')],
        ),
        (
            '<tool_call>[{"name":"a"},{"name":"b"}]</tool_call>',
            "",
            [(0, "a", "{}"), (1, "b", "{}")],
        ),
        ('<tool_call>{"name":"a","arguments":"{}"}</tool_call> done', "done", [(0, "a", "{}")]),
        # A model that stops right after the JSON.
        ('<tool_call>{"name":"a","arguments":{}}', "", [(0, "a", "{}")]),
        # A line break inside a string is no JSON, but models write it.
        (
            '<tool_call>{"name":"a","arguments":{"x":"1\n2"}}</tool_call>',
            "",
            [(0, "a", '{"x": "1\\n2"}')],
        ),
    ],
)
def test_hermes_calls(text: str, content: str, calls: list[Any]) -> None:
    assert run(HermesToolParser([]), [text]) == (content, "", calls)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "hello",
        "{",
        '{"name": "a", "arguments": [1]}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "a", "argument": {"x": 1}}',
        '{"name": "a\\u0000", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "a", "arguments": "{"}',
        '"just text"',
        "__import__('os').system('true')",
    ],
)
def test_malformed_calls_are_content(body: str) -> None:
    text = f"before <tool_call>{body}</tool_call> after"
    assert run(HermesToolParser([]), [text]) == (text, "", [])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"x": NaN}}</tool_call>', '{"x": NaN}}'),
        ('{"x": 1', '{"x": 1'),
        ('{"x": "\\d"}}</tool_call>', '{"x": "\\d"}}'),
        ('{"x":[1,]}}</tool_call>', '{"x": [1, ]}}'),
        ('{"x": {"y": tru', '{"x": {"y": tru'),
        ('{"x": "你', '{"x": "你'),
        ('{"x": "a}}</tool_call>', '{"x": "a}}</tool_call>'),
        ("{{{}}</tool_call>", "{{{}}"),
    ],
)
def test_a_call_that_has_begun_keeps_what_is_no_json(written: str, arguments: str) -> None:
    text = f'<tool_call>{{"name": "a", "arguments": {written}'
    for pieces in ([text], list(text)):
        assert run(HermesToolParser([]), pieces) == ("", "", [(0, "a", arguments)])


@pytest.mark.parametrize("kind", TOOLS)
def test_arguments_are_passed_on_while_they_arrive(kind: type[HermesToolParser]) -> None:
    body = '{"path": "a.py", "text": "' + "line \\n" * 50 + '"}'
    text = {
        HermesToolParser: '<tool_call>{"name": "f", "arguments": ' + body + "}</tool_call>",
        DeepSeekToolParser: f"{BEGIN}f{SEPARATOR}{body}{END}",
    }[kind]
    parser, sent, pieces = kind([]), "", 0
    for count, char in enumerate(text):
        for piece in parser.push(char).tool_calls:
            sent, pieces = sent + piece.arguments, pieces + 1
        known = text[: count + 1].partition(body[:9])
        if known[1]:  # all but half an escape, or a comma before the next key
            arrived = body[: 9 + len(known[2])]
            assert f"{arrived} ".startswith(sent) and len(arrived) - len(sent) <= 2
    assert sent == body and pieces > 300


def test_a_call_behind_a_malformed_one_is_found() -> None:
    good = '<tool_call>{"name":"b"}</tool_call>'
    for bad in ("<tool_call>{</tool_call>", '<tool_call>{"name": "a}</tool_call>'):
        content, _, calls = run(HermesToolParser([]), list(bad + good))
        assert (content, calls) == (bad, [(0, "b", "{}")])


def test_lone_surrogates_in_arguments_can_be_sent() -> None:
    text = '<tool_call>{"name":"a","arguments":{"x":"\\ud800"}}</tool_call>'
    _, _, calls = run(HermesToolParser([]), [text])
    calls[0][2].encode()
    assert json.loads(calls[0][2]) == {"x": "\ud800"}


def test_both_of_deepseeks_forms() -> None:
    older = f'{BEGIN}function{SEPARATOR}look\n```json\n{{"q": "```"}}\n```{END}'
    newer = f'{BEGIN}find{SEPARATOR}{{"q": 2}}{END}'
    empty = f"{BEGIN}ping{SEPARATOR}{END}"
    text = f"Let me see.{GROUP}{older}\n{newer}{empty}{END_GROUP}"
    assert run(DeepSeekToolParser([]), [text]) == (
        "Let me see.",
        "",
        [(0, "look", '{"q": "```"}'), (1, "find", '{"q": 2}'), (2, "ping", "{}")],
    )
    broken = f"{BEGIN}find{{}}{END}"
    assert run(DeepSeekToolParser([]), [broken])[0] == broken


@pytest.mark.parametrize(
    ("kind", "prompt", "text", "reasoning", "content"),
    [
        (ThinkParser, "", "<think>\nabc\n</think>\n\nxyz\n", "abc", "xyz\n"),
        (ThinkParser, "", "\n <think>a", "a", ""),
        (ThinkParser, "", "just an answer", "", "just an answer"),
        (ThinkParser, "", "  spaced", "", "  spaced"),
        (ThinkParser, "", "a </think> b", "", "a </think> b"),
        (ThinkParser, "..<think>\n", "abc\n</think>\n\nxyz", "abc", "xyz"),
        (ThinkParser, "..<think>\n", "cut off", "cut off", ""),
        (ThinkParser, "<think>\n\n</think>\n\n", "x </think> y", "", "x </think> y"),
        (DeepSeekR1Parser, "", "abc</think>xyz", "abc", "xyz"),
        (DeepSeekR1Parser, "", "<think>abc</think>xyz", "abc", "xyz"),
        (DeepSeekR1Parser, "..</think>", "xyz", "", "xyz"),
        (ThinkParser, "", "xyz", "", "xyz"),
        (ThinkParser, "..<think>", "abc</think>xyz", "abc", "xyz"),
        (DeepSeekR1Parser, "", "abc\n</think>\n\nxyz", "abc", "xyz"),
        (DeepSeekR1Parser, "", "a\n\nb\n</think>x<y </think>", "a\n\nb", "x<y </think>"),
        (
            ErnieX1Parser,
            "",
            "abc\nd\n</think>\n\n<response>\nxy\n\nz\n</response>\n",
            "abc\nd",
            "xy\n\nz",
        ),
        (ErnieX1Parser, "", "abc</think>\n\n\n<tool_call>{}", "abc", "<tool_call>{}"),
        (ErnieX1Parser, "", "abc</think>no <response> tags", "abc", "no <response> tags"),
        (ErnieX1Parser, "", "a</think><response>cut", "a", "cut"),
    ],
)
def test_thinking_styles(kind: Any, prompt: str, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert run(kind(prompt, {}), pieces)[:2] == (content, reasoning)


@pytest.mark.parametrize("kind", THINKERS)
@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_with_thinking_switched_off_everything_is_content(kind: Any, switch: str) -> None:
    text = "\n<think>a</think>\n\nb "
    assert run(kind("<think>", {switch: False}), [text]) == (text, "", [])


def test_calls_are_looked_for_in_the_answer_only() -> None:
    call = '<tool_call>{"name":"a"}</tool_call>'
    reader = AnswerReader(ThinkParser, HermesToolParser, tools=[{}])
    content, reasoning, calls = run(reader, list(f"<think>maybe {call}</think>\n\nok {call}"))
    assert (content, reasoning, calls) == ("ok", f"maybe {call}", [(0, "a", "{}")])


def test_an_answer_without_parsers_is_content() -> None:
    assert run(AnswerReader(None, None), ["<think>", "x"]) == ("<think>x", "", [])
    assert shown_tokens(None, HermesToolParser) == ("<tool_call>", "</tool_call>")


LENGTH = 300_000
HOSTILE = {
    "brackets": "[" * LENGTH,
    "call with brackets": "<tool_call>" + "[" * LENGTH,
    "nested objects": "<tool_call>" + '{"a":' * (LENGTH // 5),
    "empty calls": "<tool_call></tool_call>" * (LENGTH // 23),
    "starts": "<tool_call>" * (LENGTH // 11),
    "unterminated quotes": '<tool_call>"' * (LENGTH // 12),
    "ends in a string": '<tool_call>"' + "</tool_call>" * (LENGTH // 12),
    "half markers": "</tool_cal<thin" * (LENGTH // 15),
    "spaces": " " * LENGTH,
    "line breaks": "\n" * LENGTH,
    "backslashes": '<tool_call>"' + "\\" * LENGTH,
    "thoughts": "<think></think>" * (LENGTH // 15),
    "number": "<tool_call>" + "9" * LENGTH + "</tool_call>",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", [HermesToolParser, DeepSeekToolParser, ThinkParser, ErnieX1Parser])
def test_hostile_text_costs_linear_time(kind: Any, name: str) -> None:
    make = (lambda: kind([])) if kind in TOOLS else (lambda: kind("", {}))
    # Linear work takes two seconds at most, quadratic work many times eight.
    check_linear(make, HOSTILE[name], 50, 8)


def test_parsers_evaluate_nothing() -> None:
    root = Path(fd_parsers.__file__).parent
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), file
            assert not (isinstance(node, ast.Attribute) and node.attr == "literal_eval"), file


REASONING_NAMES = [
    *("cohere2", "hunyuan_a13b", "lfm2", "olmo3", "seed_oss", "smollm3"),
    "deepseek_r1",
    "deepseek_v3",
    "ernie45",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "openai_gptoss",
    "qwen3",
    "deepseek-r1",
    "deepseek",
    "ernie-x1",
    "ernie-45-vl-thinking",
]
TOOL_NAMES = [
    *("cohere2", "hunyuan_a13b", "lfm2", "olmo3", "seed_oss", "smollm3"),
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "ernie45",
    "functiongemma",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "granite4",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "minimax_m2",
    "mistral",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
    "qwen3",
    "deepseek",
    "ernie-x1",
]


def test_parsers_are_found_by_the_names_that_users_know() -> None:
    for name in REASONING_NAMES:
        assert isinstance(plugins.lookup("reasoning_parser", name)("", {}), ReasoningParser)
    for name in TOOL_NAMES:
        assert isinstance(plugins.lookup("tool_parser", name)([]), ToolParser)


@pytest.mark.parametrize(
    ("parser", "prompt", "kwargs", "begin", "end"),
    [
        (ThinkParser, "hi<|assistant|>", {}, "<think>", "</think>"),
        (ThinkParser, "hi<|assistant|><think>\n", {}, None, "</think>"),
        (DeepSeekR1Parser, "hi<|assistant|>", {}, None, "</think>"),
        (ThinkParser, "hi<think>", {}, None, "</think>"),
    ],
)
def test_parsers_say_how_thinking_will_look(
    parser: type, prompt: str, kwargs: dict, begin: str | None, end: str
) -> None:
    ahead = thinking_ahead(parser, prompt, kwargs)
    assert ahead is not None
    assert (ahead.begin, ahead.end) == (begin, end)


@pytest.mark.parametrize("parser", [ThinkParser, DeepSeekR1Parser])
def test_nothing_waits_where_nobody_thinks(parser: type) -> None:
    assert thinking_ahead(parser, "hi<think>\n\n</think>\n\n") is None
    assert thinking_ahead(parser, "hi", {"enable_thinking": False}) is None
    assert thinking_ahead(None, "hi<think>") is None
