"""Structural tags, and text that spells tokens which stand beside the vocabulary. What each format
takes was compared with XGrammar 0.2.9 (Grammar.from_structural_tag), text by text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fd_grammar_llguidance.backend import LLGuidanceBackend
from tokenizers import Tokenizer

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import StructuredOutputsParams

FILE = Path(__file__).parents[3] / "models" / "ernie-tiny" / "tokenizer.json"
END = 2
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
TEXT = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, end: str | list[str], content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: dict[str, Any], trigger: str = "<f", **more: bool) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": [trigger], "tags": list(tags), **more}


F1, F2, Q = (
    tag("<f1>", "</f>", JSON),
    tag("<f2>", "</f>", const("q")),
    tag("<f>", "</f>", const("q")),
)
HERMES = tag('<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>", JSON)
CALLS = tag("<calls>", "</calls>", {"type": "tags_with_separator", "separator": "\n", "tags": [Q]})

CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": (const("abc"), ["abc"], ["ab", "abcd", ""]),
    "json_schema": (JSON, ['{"x": 1}'], ['{"y": 1}', ""]),
    "regex": ({"type": "regex", "pattern": "[0-9]{3}/a"}, ["123/a"], ["12", "123/ab"]),
    "grammar": (
        {"type": "grammar", "grammar": 'root ::= "a" b\nb ::= "x" | "y"'},
        ["ax", "ay"],
        ["az"],
    ),
    "sequence": (
        {"type": "sequence", "elements": [const("A:"), JSON]},
        ['A:{"x": 2}'],
        ["A:", "{}"],
    ),
    "or": ({"type": "or", "elements": [const("yes"), JSON]}, ["yes", '{"x": 1}'], ["no"]),
    "any_text": (TEXT, ["", "anything <at> all\nx"], []),
    "text in a tag": (tag("<f>", "</f>", TEXT), ["<f></f>", "<f>abc</f>"], ["<f>a</f>b", "<f>a"]),
    "one end of two": (tag("<f>", ["</f>", "</g>"], TEXT), ["<f></g>", "<f>a</f>"], ["<f>a"]),
    "excluded": (
        tag("<f>", "</f>", {**TEXT, "excludes": ["no"]}),
        ["<f>abc</f>"],
        ["<f>anob</f>"],
    ),
    "thinking": (
        {"type": "sequence", "elements": [tag("<think>\n", "\n</think>", TEXT), const("ok")]},
        ["<think>\nabc\n</think>ok"],
        ["<think>\nabc</think>ok", "<think>\nabc\n</think>no", "ok"],
    ),
    "triggered_tags": (
        triggered(F1, F2),
        ["", "text", 'a<f1>{"x": 1}</f>b', 'a<f2>q</f>b<f1>{"x": 1}</f>'],
        ["a<f3>", "a<f1>z"],
    ),
    "at_least_one": (
        triggered(F1, at_least_one=True),
        ['<f1>{"x": 1}</f>b', '<f1>{"x": 1}</f><f1>{"x": 1}</f>'],
        ["", "text", 'a<f1>{"x": 1}</f>'],
    ),
    "stop_after_first": (
        triggered(F1, stop_after_first=True),
        ["", "text", 'a<f1>{"x": 1}</f>'],
        ['a<f1>{"x": 1}</f>b'],
    ),
    "both": (
        triggered(F1, stop_after_first=True, at_least_one=True),
        ['<f1>{"x": 1}</f>'],
        ["", "text", '<f1>{"x": 1}</f>b'],
    ),
    "tags_with_separator": (
        {"type": "tags_with_separator", "tags": [Q], "separator": ","},
        ["", "<f>q</f>", "<f>q</f>,<f>q</f>"],
        ["<f>q</f><f>q</f>", "<f>q</f>,"],
    ),
    "tags in a tag": (
        triggered(CALLS, trigger="<calls>", stop_after_first=True),
        ["hi<calls><f>q</f>\n<f>q</f></calls>", "<calls></calls>", "hi"],
        ["<calls><f>z</f></calls>"],
    ),
    "triggers in a tag": (
        tag("<a>", "</a>", triggered(F2)),
        ["<a>text</a>", "<a>t<f2>q</f>u</a>"],
        ["<a>t<f2>z</f></a>", "<a>t</a>z"],
    ),
    "added tokens": (
        triggered(HERMES, trigger="<tool_call>"),
        ["hi", 'hi<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>bye'],
        ['<tool_call>\n{"name": "g"'],
    ),
    "a trigger that ends in an added token": (
        triggered(HERMES, trigger="<tool"),
        ['hi<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'],
        ['<tool_call>\n{"name": "g"'],
    ),
    "repetitions": (
        {
            "type": "sequence",
            "elements": [
                {"type": "optional", "content": const("a")},
                {"type": "star", "content": const("b")},
                {"type": "plus", "content": const("c")},
                {"type": "repeat", "content": const("d"), "min": 1, "max": 2},
            ],
        },
        ["cd", "abbccdd"],
        ["d", "ac", "cddd"],
    ),
}


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(str(FILE), 3072, [END, 4])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FILE))


def fits(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, params: StructuredOutputsParams, text: str
) -> bool:
    matcher = backend.matcher(backend.compile(params, {}))
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids, END]
    return matcher.accept(ids) == len(ids)


@pytest.mark.parametrize("name", CASES)
def test_a_format_takes_what_it_describes_and_nothing_else(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, name: str
) -> None:
    form, right, wrong = CASES[name]
    asked = {"type": "structural_tag", "format": form}
    params = StructuredOutputsParams(structural_tag=json.dumps(asked))
    assert [t for t in right if not fits(backend, tokenizer, params, t)] == []
    assert [t for t in wrong if fits(backend, tokenizer, params, t)] == []


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"type": "nothing"}, r"format has the type 'nothing'; possible: any_text, const_string"),
        ([1], "format must be an object"),
        ({"type": "sequence", "elements": [TEXT, const("a")]}, r"elements\[0\] would never end"),
        ({"type": "sequence", "elements": []}, "at least one entry"),
        (
            tag("<a>", "</a>", {"type": "or", "elements": [{}]}),
            r"content.elements\[0\] has the type",
        ),
        (triggered(tag("<g>", "</g>", JSON)), r"no trigger starts format.tags\[0\].begin '<g>'"),
        ({"type": "regex", "pattern": "(((("}, "regex"),
        ({"type": "regex", "pattern": "a{20000}"}, "repeats"),
        ({"type": "grammar", "grammar": "root ::= missing"}, "EBNF"),
        ({"type": "json_schema", "json_schema": SCHEMA, "style": "qwen_xml"}, "possible: json"),
        ({"type": "repeat", "content": const("a"), "min": 3, "max": 2}, "max"),
        (tag("<|im_end|>", "</a>", JSON), "ends every answer"),
        (triggered(*[tag(f"<f{i}>", "</f>", TEXT) for i in range(65)]), "more than 64 tags"),
    ],
    ids=str,
)
def test_an_impossible_format_is_refused_with_its_place(
    backend: LLGuidanceBackend, form: Any, word: str
) -> None:
    asked = StructuredOutputsParams(structural_tag=json.dumps({"format": form}))
    with pytest.raises(InvalidRequest, match=word) as caught:
        backend.compile(asked, {})
    assert caught.value.param == "structured_outputs.structural_tag"


@pytest.mark.parametrize("text", ["<tool_call>x", "a<think>b</think>", "<tools>", "a<b>c"])
def test_a_choice_may_spell_added_tokens(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, text: str
) -> None:
    params = StructuredOutputsParams(choice=[text, "other"])
    assert fits(backend, tokenizer, params, text)
    assert fits(backend, tokenizer, params, "other")
    assert not fits(backend, tokenizer, params, text + "x")
