"""Every format of tool calls: answers in its published form, damaged ones, and any split of both.

Each answer is written as the sources that the parser's file names show it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fd_parsers.calls import ToolCallStream
from fd_parsers.deepseek import DeepSeekToolParser
from fd_parsers.gemma import FunctionGemmaToolParser, Gemma4ToolParser
from fd_parsers.harmony import HarmonyReasoningParser, HarmonyToolParser
from fd_parsers.hermes import HermesToolParser
from fd_parsers.kimi import KimiK2ToolParser
from fd_parsers.lists import (
    CommandToolParser,
    GraniteToolParser,
    HunyuanToolParser,
    Phi4MiniToolParser,
)
from fd_parsers.llama import (
    Lfm2ToolParser,
    Llama3JsonToolParser,
    Olmo3ToolParser,
    PythonicToolParser,
)
from fd_parsers.mistral import MistralToolParser
from fd_parsers.tags import (
    DeepSeekV32ToolParser,
    GlmToolParser,
    MiniMaxM2ToolParser,
    QwenToolParser,
    SeedOssToolParser,
    TagToolParser,
)
from fd_parsers.think import (
    CommandThinkParser,
    DeepSeekR1Parser,
    Gemma4ThinkParser,
    GraniteThinkParser,
    HunyuanThinkParser,
    MistralThinkParser,
    SeedThinkParser,
    ThinkParser,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import check_linear, cut, run

from fastdeploy_core.parsers.answer import AnswerReader

PARAMETERS = {
    "type": "object",
    "properties": {
        "location": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"type": ["string", "null"]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("get_weather", "get_time")
]
PARIS = '{"location": "Paris, \\"FR\\"", "days": 3}'
TOKYO = '{"location": "東京", "tags": ["a", "<b>"]}'
BAR = "\uff5c"
DSML = f"{BAR}DSML{BAR}"
TWO = [("get_weather", json.loads(PARIS)), ("get_time", json.loads(TOKYO))]

# Parser, answer, content, calls.
ANSWERS: dict[str, tuple[type[ToolCallStream], str, str, list[tuple[str, Any]]]] = {
    "hermes": (
        HermesToolParser,
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_time", "arguments": {TOKYO}}}\n</tool_call>',
        "I look.",
        TWO,
    ),
    "deepseek_v3": (
        DeepSeekToolParser,
        f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>"
        f"get_weather\n```json\n{PARIS}\n```<{BAR}tool▁call▁end{BAR}>\n"
        f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>get_time\n```json\n{TOKYO}\n```"
        f"<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>",
        "",
        TWO,
    ),
    "deepseek_v31": (
        DeepSeekToolParser,
        f"Sure.<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>get_weather"
        f"<{BAR}tool▁sep{BAR}>{PARIS}<{BAR}tool▁call▁end{BAR}><{BAR}tool▁call▁begin{BAR}>get_time"
        f"<{BAR}tool▁sep{BAR}>{TOKYO}<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>",
        "Sure.",
        TWO,
    ),
    "deepseek_v32": (
        DeepSeekV32ToolParser,
        f'I look.\n\n<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n'
        f'<{DSML}parameter name="location" string="true">Paris, "FR"</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="get_time">\n'
        f'<{DSML}parameter name="location" string="true">東京</{DSML}parameter>\n'
        f'<{DSML}parameter name="tags" string="false">["a", "<b>"]</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}function_calls>",
        "I look.",
        TWO,
    ),
    "kimi_k2": (
        KimiK2ToolParser,
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{PARIS}<|tool_call_end|><|tool_call_begin|>"
        f"functions.get_time:1<|tool_call_argument_begin|>{TOKYO}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "I look.",
        TWO,
    ),
    "mistral to v7": (
        MistralToolParser,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}, "id": "abcdefghi"}}, '
        f'{{"name": "get_time", "arguments": {TOKYO}}}]',
        "",
        TWO,
    ),
    "mistral from v11": (
        MistralToolParser,
        f"I look.[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]"
        f"{TOKYO}",
        "I look.",
        TWO,
    ),
    "llama3_json": (
        Llama3JsonToolParser,
        f'{{"name": "get_weather", "parameters": {PARIS}}}; '
        f'{{"name": "get_time", "parameters": {TOKYO}}}',
        "",
        TWO,
    ),
    "llama3_json with a tag": (
        Llama3JsonToolParser,
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}',
        "",
        TWO[:1],
    ),
    "pythonic": (
        PythonicToolParser,
        "[get_weather(location='Paris, \"FR\"', days=3), "
        "get_time(location=\"\\u6771\\u4eac\", tags=['a', '<b>',])]",
        "",
        TWO,
    ),
    "llama4_pythonic": (
        PythonicToolParser,
        "I look.<|python_start|>[get_weather(location='Paris, \\'FR\\'', exact=True, note=None), "
        "get_time()]<|python_end|>",
        "I look.",
        [
            ("get_weather", {"location": "Paris, 'FR'", "exact": True, "note": None}),
            ("get_time", {}),
        ],
    ),
    "qwen3_coder": (
        TagToolParser,
        'I look.\n<tool_call>\n<function=get_weather>\n<parameter=location>\nParis, "FR"\n'
        "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=get_time>\n<parameter=location>\n東京\n</parameter>\n<parameter=tags>\n"
        '["a", "<b>"]\n</parameter>\n</function>\n</tool_call>',
        "I look.",
        TWO,
    ),
    "qwen3_coder without a group": (
        TagToolParser,
        "<function=get_time>\n<parameter=note>\n\n two\nlines \n\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n<parameter=location>\n7\n</parameter>\n</function>",
        "",
        [("get_time", {"note": "\n two\nlines \n", "exact": True, "location": "7"})],
    ),
    "qwen3_moe": (
        QwenToolParser,
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        "<tool_call>\n<function=get_time>\n<parameter=location>\n東京\n</parameter>\n"
        '<parameter=tags>\n["a", "<b>"]\n</parameter>\n</function>\n</tool_call>',
        "I look.",
        TWO,
    ),
    "glm45": (
        GlmToolParser,
        "I look.\n<tool_call>get_weather\n<arg_key>location</arg_key>\n"
        '<arg_value>Paris, "FR"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n'
        "</tool_call>\n<tool_call>get_time\n<arg_key>location</arg_key>\n"
        "<arg_value>東京</arg_value>\n<arg_key>tags</arg_key>\n"
        '<arg_value>["a", "<b>"]</arg_value>\n'
        "</tool_call>",
        "I look.",
        TWO,
    ),
    "glm47": (
        GlmToolParser,
        "<tool_call>get_weather<arg_key>location</arg_key><arg_value>Rome</arg_value></tool_call>"
        "<tool_call>get_time</tool_call>",
        "",
        [("get_weather", {"location": "Rome"}), ("get_time", {})],
    ),
    "minimax_m2": (
        MiniMaxM2ToolParser,
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="location">Paris, "FR"</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="get_time">\n<parameter name="location">東京</parameter>\n'
        '<parameter name="tags">["a", "<b>"]</parameter>\n</invoke>\n</minimax:tool_call>',
        "I look.",
        TWO,
    ),
    "gemma4": (
        Gemma4ToolParser,
        '<|tool_call>call:get_weather{location:<|"|>Paris, "FR"<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:get_time{location:<|"|>東京<|"|>,tags:[<|"|>a<|"|>,<|"|><b><|"|>]}'
        "<tool_call|>",
        "",
        TWO,
    ),
    "functiongemma": (
        FunctionGemmaToolParser,
        "<start_function_call>call:get_weather{location:<escape>Rome<escape>,exact:true}"
        "<end_function_call>",
        "",
        [("get_weather", {"location": "Rome", "exact": True})],
    ),
    "granite": (
        GraniteToolParser,
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, '
        f'{{"name": "get_time", "arguments": {TOKYO}}}]',
        "",
        TWO,
    ),
    "granite 3.1": (
        GraniteToolParser,
        '<tool_call>[{"arguments": {}, "name": "get_weather"}]',
        '<tool_call>[{"arguments": {}, "name": "get_weather"}]',
        [],
    ),
    "cohere2": (
        CommandToolParser,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f'{PARIS}}},\n    {{"tool_call_id": "1", "tool_name": "get_time", '
        f'"parameters": {TOKYO}}}\n]<|END_ACTION|>',
        "",
        TWO,
    ),
    "cohere2 without a call": (
        CommandToolParser,
        "<|START_RESPONSE|>It is 3 o'clock in Paris.<|END_RESPONSE|>",
        "It is 3 o'clock in Paris.",
        [],
    ),
    "hunyuan_a13b": (
        HunyuanToolParser,
        f'I look.\n<tool_calls>[{{"name": "get_weather", "arguments": {PARIS}}}, '
        f'{{"name": "get_time", "arguments": {TOKYO}}}]</tool_calls>',
        "I look.",
        TWO,
    ),
    "lfm2": (
        Lfm2ToolParser,
        "<|tool_call_start|>[get_weather(location='Paris, \"FR\"', days=3), "
        "get_time(location=\"東京\", tags=['a', '<b>'])]<|tool_call_end|>I look.",
        "I look.",
        TWO,
    ),
    "olmo3": (
        Olmo3ToolParser,
        'I look.<function_calls>get_weather(location="Paris, \\"FR\\"", days=3)\n'
        'get_time(location="東京", tags=["a", "\\u003cb\\u003e"], exact=true, note=null)'
        "</function_calls>",
        "I look.",
        [
            TWO[0],
            ("get_time", {"location": "東京", "tags": ["a", "<b>"], "exact": True, "note": None}),
        ],
    ),
    "olmo3 without a call": (
        Olmo3ToolParser,
        "<function_calls>look at Paris</function_calls>",
        "<function_calls>look at Paris",
        [],
    ),
    "seed_oss": (
        SeedOssToolParser,
        "I look.\n<seed:tool_call>\n<function=get_weather>\n"
        '<parameter=location>Paris, "FR"</parameter>\n<parameter=days>3</parameter>\n</function>\n'
        "</seed:tool_call>\n<seed:tool_call>\n<function=get_time>\n"
        '<parameter=location>東京</parameter>\n<parameter=tags>["a", "<b>"]</parameter>\n'
        "</function>\n</seed:tool_call>",
        "I look.",
        TWO,
    ),
    "minimax_m2, a value's own line breaks": (
        MiniMaxM2ToolParser,
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="location">\nParis\n\n'
        '</parameter>\n<parameter name="note">\nlook</parameter>\n</invoke>\n</minimax:tool_call>',
        "",
        [("get_weather", {"location": "\nParis\n\n", "note": "\nlook"})],
    ),
    "phi4_mini_json": (
        Phi4MiniToolParser,
        f'functools[{{"name": "get_weather", "arguments": {PARIS}}}, '
        f'{{"name": "get_time", "arguments": {TOKYO}}}]',
        "",
        TWO,
    ),
    "phi4 with tags": (
        Phi4MiniToolParser,
        'See functools.<|tool_call|>[{"type": "function", "name": "get_time"}]<|/tool_call|>',
        "See functools.",
        [("get_time", {})],
    ),
    "openai": (
        HarmonyToolParser,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|><|start|>assistant "
        f"to=functions.get_time<|channel|>commentary json<|message|>{TOKYO}<|call|>",
        "I look.",
        TWO,
    ),
    "openai, recipient first": (
        HarmonyToolParser,
        ' to=functions.get_time<|channel|>commentary <|constrain|>json<|message|>{"days":1}',
        "",
        [("get_time", {"days": 1})],
    ),
}
NAMES = list(ANSWERS)
KINDS = sorted({kind for kind, _, _, _ in ANSWERS.values()}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_in_the_published_form(name: str) -> None:
    kind, text, content, calls = ANSWERS[name]
    for pieces in ([text], list(text)):
        found = run(kind(TOOLS), pieces)
        assert found[0] == content
        assert [(call, json.loads(given)) for _, call, given in found[2]] == calls


WORDS = ("Paris", "東京", "get_weather", "get_time", "look", "<b>")


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_is_cut_off_loses_no_word(name: str) -> None:
    kind, text, _, calls = ANSWERS[name]
    for end in range(len(text)):
        found = run(kind(TOOLS), [text[:end]])
        assert run(kind(TOOLS), list(text[:end])) == found
        assert [call for _, call, _ in found[2]] == [call for call, _ in calls][: len(found[2])]
        shown = " ".join([found[0], *(f"{call} {given}" for _, call, given in found[2])])
        for word in WORDS:
            count = text.count(word, 0, end)
            assert shown.count(word) >= count, text[:end]
            begun = next(
                (n for n in range(len(word) - 1, 1, -1) if text[:end].endswith(word[:n])), 0
            )
            assert word[:begun] in shown, text[:end]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_split_gives_the_same(kind: type[ToolCallStream], data: st.DataObject) -> None:
    texts = [text for other, text, _, _ in ANSWERS.values() if other is kind]
    words = [*kind.markers, "get_weather", "nobody", PARIS, "{", "}", "[", "]", '"', "\\", "\n",
             "(", "a=1", ")", "call:", "ü", "\U0001f600", " ", "[ARGS]", "x"]  # fmt: skip
    parts = st.sampled_from(texts).flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
            lambda ends: text[min(ends) : max(ends)]
        )
    )
    text = "".join(data.draw(st.lists(parts | st.sampled_from(words), max_size=6)))
    places = data.draw(st.lists(st.integers(0, 400), max_size=8))
    whole = run(kind(TOOLS), [text])
    assert run(kind(TOOLS), cut(text, places)) == whole
    assert run(kind(TOOLS), list(text)) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_calls_passes_at_once(kind: type[ToolCallStream]) -> None:
    text = "A plain answer, with [brackets], {braces} and 2 < 3.\n  Done."
    parser, shown = kind(TOOLS), ""
    for count, char in enumerate(text, 1):
        shown += parser.push(char).content
        assert len(text[:count]) - len(shown) <= 4
    assert shown + parser.finish().content == text


@pytest.mark.parametrize("kind", [Llama3JsonToolParser, PythonicToolParser])
@pytest.mark.parametrize(
    "text", ['{"name": "nobody", "parameters": {}}', "[nobody(a=1)]", "[1, 2]", '{"answer": 42}']
)
def test_an_answer_like_a_call_is_one_only_for_a_function_of_the_request(
    kind: type[ToolCallStream], text: str
) -> None:
    assert run(kind(TOOLS), list(text)) == (text, "", [])


def test_an_unknown_function_behind_a_marker_is_a_call() -> None:
    """The client says that there is none, and the model can try again."""
    text = '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'
    assert run(HermesToolParser(TOOLS), [text]) == ("", "", [(0, "nobody", "{}")])


def test_ids_have_the_form_that_chat_templates_ask_for() -> None:
    _, text, _, _ = ANSWERS["kimi_k2"]
    kimi = KimiK2ToolParser(TOOLS)
    assert [call.id for call in kimi.push(text).tool_calls] == [
        "functions.get_weather:0", "functions.get_time:1",
    ]  # fmt: skip
    _, text, _, _ = ANSWERS["mistral from v11"]
    first, second = MistralToolParser(TOOLS).push(text).tool_calls
    assert first.id and len(first.id) == 9 and first.id.isalnum() and second.id == "abcdefghi"


ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (
            f"{ANALYSIS}Simple.{NEXT}<|channel|>final<|message|>2 + 2 = 4.<|return|>",
            "2 + 2 = 4.", "Simple.", [],
        ),
        (
            f"{ANALYSIS}Use it.{NEXT}<|channel|>commentary to=functions.get_weather "
            f"<|constrain|>json<|message|>{PARIS}<|call|>",
            "", "Use it.", [(0, "get_weather", PARIS)],
        ),
        (
            f"{ANALYSIS}One.{NEXT}{ANALYSIS}Two.{NEXT}<|channel|>commentary<|message|>First, "
            f"**look**.{NEXT}<|channel|>final<|message|>Done",
            "First, **look**.\nDone", "One.\nTwo.", [],
        ),
        (f"{ANALYSIS}cut o", "", "cut o", []),
        ("no header at all", "no header at all", "", []),
        ('{"forced": "json"}', '{"forced": "json"}', "", []),
        (f"{ANALYSIS}a<|channel|>final<|message|>b", "b", "a", []),
        ("<|channel|>fin", "<|channel|>fin", "", []),
        (
            "<|channel|>commentary to=functions.get_time<|message|>not json<|call|>",
            "", "", [(0, "get_time", "not json")],
        ),
        (
            "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
            "", "print(1)", [],
        ),
        ("<|channel|>commentary to=functions.get_time<|message|><|call|>", "", "",
         [(0, "get_time", "{}")]),
    ],
)  # fmt: skip
def test_harmony(text: str, content: str, reasoning: str, calls: list[Any]) -> None:
    for pieces in ([text], list(text)):
        both = AnswerReader(HarmonyReasoningParser, HarmonyToolParser, tools=TOOLS)
        alone = AnswerReader(None, HarmonyToolParser, tools=TOOLS)
        assert run(both, pieces) == (content, reasoning, calls)
        assert run(alone, pieces) == (content, reasoning, calls)


@pytest.mark.parametrize(
    ("kind", "text", "reasoning", "content"),
    [
        (MistralThinkParser, "[THINK]why[/THINK]so", "why", "so"),
        (Gemma4ThinkParser, "<|channel>thought\nwhy<channel|>so", "why", "so"),
        (
            GraniteThinkParser,
            "Here is my thought process:\nwhy\n\nHere is my response:\nso",
            "why",
            "so",
        ),
        (GraniteThinkParser, "Here is my answer", "", "Here is my answer"),
        (SeedThinkParser, "<seed:think>\nwhy</seed:think>\nso", "why", "so"),
        (HunyuanThinkParser, "<think>\nwhy\n</think>\n<answer>\nso\n</answer>", "why", "so"),
        (HunyuanThinkParser, "<answer>\nso\n</answer>", "", "so"),
        (HunyuanThinkParser, "so, no tags", "", "so, no tags"),
        (
            CommandThinkParser,
            "<|START_THINKING|>why<|END_THINKING|><|START_RESPONSE|>so<|END_RESPONSE|>",
            "why",
            "so",
        ),
        (CommandThinkParser, "<|START_TEXT|>so<|END_TEXT|>", "", "so"),
    ],
)
def test_other_marks_of_thinking(kind: Any, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert run(kind("", {}), pieces) == (content, reasoning, [])


# Of each, the words that its text may be cut within.
THINKING: dict[Any, list[str]] = {
    MistralThinkParser: ["[THINK]", "[/THINK]", "[TOOL_CALLS]"],
    Gemma4ThinkParser: ["<|channel>thought\n", "<|channel>", "<channel|>", "<|tool_call>"],
    GraniteThinkParser: ["Here is my thought process:", "Here is my response:", "Here is"],
    HunyuanThinkParser: ["<think>", "</think>", "<answer>", "</answer>"],
    CommandThinkParser: [
        *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        *("<|START_TEXT|>", "<|END_TEXT|>", "<|START_ACTION|>"),
    ],
    HarmonyReasoningParser: [
        *("<|channel|>", "analysis", "commentary", "final", "<|message|>", "<|end|>", "<|return|>"),
        *("<|start|>assistant", " to=functions.get_weather", "<|constrain|>json", "<|call|>"),
    ],
}


@pytest.mark.parametrize("kind", THINKING)
@pytest.mark.parametrize("tools", [None, HermesToolParser, HarmonyToolParser])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_split_of_thinking_gives_the_same(kind: Any, tools: Any, data: st.DataObject) -> None:
    words = [*THINKING[kind], "\n", "\n\n", " ", "why", "ü", "<", "<|", "[", PARIS, "<tool_call>"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=10)))
    places = data.draw(st.lists(st.integers(0, 200), max_size=8))

    def read(pieces: list[str]) -> Any:
        return run(AnswerReader(kind, tools, tools=TOOLS), pieces)

    whole = read([text])
    assert read(cut(text, places)) == whole and read(list(text)) == whole


@pytest.mark.parametrize(
    ("kind", "end"), [(HunyuanThinkParser, "</think>"), (CommandThinkParser, "<|END_THINKING|>")]
)
def test_tags_of_an_answer_are_read_where_nobody_thinks(kind: Any, end: str) -> None:
    opening, closing = kind.wrappers[:2]
    text = f"{opening}\nso\n{closing}"
    for pieces in ([text], list(text)):
        assert run(kind(f"<think>\n\n{end}\n", {}), pieces) == ("so", "", [])
        assert run(kind("", {"enable_thinking": False}), pieces) == ("so", "", [])


@pytest.mark.parametrize("kind", [ThinkParser, DeepSeekR1Parser])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "kimi_k2", "deepseek_v32"])
def test_a_call_behind_thinking(kind: Any, name: str) -> None:
    tool, text, content, calls = ANSWERS[name]
    reader = AnswerReader(kind, tool, tools=TOOLS, prompt_text="<think>")
    found = run(reader, list(f"{text}\n</think>\n\n{text}"))
    assert found[:2] == (content, text)
    assert [(call, json.loads(given)) for _, call, given in found[2]] == calls


# Those that are others with other tags cost what these do.
TAGS_ALONE = (CommandToolParser, HunyuanToolParser, Lfm2ToolParser, SeedOssToolParser)


@pytest.mark.parametrize(
    "kind", [*(k for k in KINDS if k not in TAGS_ALONE), HarmonyReasoningParser]
)
def test_hostile_text_costs_linear_time(kind: Any) -> None:
    make = (lambda: kind("", {})) if kind is HarmonyReasoningParser else (lambda: kind(TOOLS))
    text = next((text for other, text, _, _ in ANSWERS.values() if other is kind), "<|start|>")
    begun = text[: text.index("Paris")] if "Paris" in text else text
    size = 100_000
    for unit in (*kind.markers, begun, text, "[", "{", '{"a":', '"', "\\", " ", "9", "(", "a="):
        # Linear work takes half a second at most; all that is pending looked at again for every
        # piece, character by character, takes five to ten.
        check_linear(make, begun + unit * (size // len(unit)), 30, 4)
