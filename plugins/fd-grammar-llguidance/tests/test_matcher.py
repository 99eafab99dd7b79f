"""The llguidance backend: what its masks let through is valid, whatever the model prefers."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from typing import Literal

import jsonschema
import numpy as np
import pydantic
import pytest
from fd_grammar_llguidance.backend import LLGuidanceBackend
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import StructuredOutputsParams

EOS = 2
VOCAB = 650  # wider than the tokenizer, and no multiple of 32


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    text = ['{"name": "value", "age": 12, "list": [true, false, null, -1.5e3]}', "hello world"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>", "<think>", "</think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(text * 20, trainer)
    return made


@pytest.fixture(scope="module")
def tokenizer_json(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def backend(tokenizer_json: str) -> LLGuidanceBackend:
    return LLGuidanceBackend(tokenizer_json, VOCAB, [EOS])


def allowed(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def generate(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, compiled: bytes, seed: int, limit: int = 400
) -> str | None:
    """Sample from random logits through the mask; None when `limit` tokens did not end it.

    From `limit / 4` tokens on, tokens that close things are preferred, so that answers end.
    """
    rng = np.random.default_rng(seed)
    matcher = backend.matcher(compiled)
    mask = np.zeros((VOCAB + 31) // 32, dtype=np.int32)
    closing = [tokenizer.token_to_id(t) for t in ('"', "}", "]", "}}", '"}')]
    closing = [t for t in closing if t is not None] + [EOS]
    tokens: list[int] = []
    for position in range(limit):
        mask[:] = 0
        matcher.fill_mask(mask)
        possible = allowed(mask)
        assert possible.size, "a mask must leave something possible"
        assert possible.max() < VOCAB
        logits = rng.normal(size=VOCAB) * 3
        if position > limit / 4:
            logits[closing] += 50
        token = int(possible[np.argmax(logits[possible])])
        assert matcher.accept([token]) == 1
        if token == EOS:
            return tokenizer.decode(tokens, skip_special_tokens=False)
        tokens.append(token)
    return None


SCALARS = [
    {"type": "string", "maxLength": 12},
    {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]+$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "enum": ["red", "green", 'qu"oted', "naïve"]},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "boolean"},
    {"type": "null"},
    {"const": 17},
    {"enum": [1, "one", None, True]},
]


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    kind = rng.choice(["scalar"] * 2 + (["object", "array", "anyOf"] if depth < 3 else []))
    if kind == "object" or depth == 0:
        names = rng.sample(["id", "name", "tags", "a b", "näh", "x"], rng.randint(1, 4))
        properties = {name: random_schema(rng, depth + 1) for name in names}
        required = [name for name in names if rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required}
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}
    return rng.choice(SCALARS)


@pytest.mark.parametrize("block", range(12))
def test_only_valid_json_comes_out_of_random_logits(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, block: int
) -> None:
    finished = 0
    for number in range(block * 10, block * 10 + 10):
        schema = random_schema(random.Random(number))
        compiled = backend.compile(StructuredOutputsParams(json=schema), {})
        for seed in range(3):
            text = generate(backend, tokenizer, compiled, seed)
            if text is not None:
                jsonschema.validate(json.loads(text), schema)
                finished += 1
    assert finished >= 20, "most of the 30 answers must come to an end"


def test_a_format_that_is_not_known_is_a_note(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    """As in JSON Schema; pydantic writes "path" and "password". A known one is obeyed."""
    text = {"type": "string", "format": "path", "maxLength": 9}
    day = {"type": "string", "format": "date"}
    schema = {
        "type": "object",
        "properties": {"format": {"anyOf": [text]}, "day": {"allOf": [day]}, "c": {"$ref": "#/x"}},
        "required": ["format", "day", "c"],
        "additionalProperties": False,
        "x": {"const": {"format": "path"}},
    }
    compiled = backend.compile(StructuredOutputsParams(json=schema), {})
    made = [generate(backend, tokenizer, compiled, seed) for seed in range(8)]
    answers = [json.loads(answer) for answer in made if answer is not None]
    assert answers
    for answer in answers:
        jsonschema.validate(answer, schema)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", answer["day"])


def test_sets_are_lists_that_their_reader_checks(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    some = set[Literal[1, 2]], pydantic.Field(min_length=1, max_length=3)
    answer_type = pydantic.create_model("Answer", uniqueItems=some)
    schema = answer_type.model_json_schema()
    assert '"uniqueItems": true' in json.dumps(schema)
    compiled = backend.compile(StructuredOutputsParams(json=schema), {})
    answers = [generate(backend, tokenizer, compiled, seed) for seed in range(8)]
    for answer in filter(None, answers):
        assert answer_type.model_validate_json(answer).model_dump()["uniqueItems"] <= {1, 2}
    assert any(answers)


@pytest.mark.parametrize("names", [{"enum": ["a", "b c"]}, {"$ref": "#/$defs/Name"}])
def test_names_of_properties_may_be_listed(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, names: dict
) -> None:
    """As pydantic writes dict[Literal["a", "b c"], bool]."""
    some = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "boolean"}}
    schema = {**some, "minProperties": 1, "$defs": {"Name": {"enum": ["a", "b c"]}}}
    compiled = backend.compile(StructuredOutputsParams(json=schema), {})
    answers = [generate(backend, tokenizer, compiled, seed) for seed in range(12)]
    found = [json.loads(answer) for answer in answers if answer is not None]
    for answer in found:
        jsonschema.validate(answer, schema)
    assert {name for answer in found for name in answer} == {"a", "b c"}


def test_objects_that_list_properties_take_no_others_unless_asked(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    params = StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    )
    tokens = tokenizer.encode('{"a": 1, "b": 2}').ids
    closed = backend.matcher(backend.compile(params, {}))
    assert closed.accept(tokens) < len(tokens)
    option = {"disable_additional_properties": False}
    opened = backend.matcher(backend.compile(params, option))
    assert opened.accept(tokens) == len(tokens)


def test_whitespace_can_be_forbidden(backend: LLGuidanceBackend, tokenizer: Tokenizer) -> None:
    params = StructuredOutputsParams(json_object=True)
    spaced = tokenizer.encode('{ "a": 1 }').ids
    assert backend.matcher(backend.compile(params, {})).accept(spaced) == len(spaced)
    strict = backend.matcher(backend.compile(params, {"disable_any_whitespace": True}))
    assert strict.accept(spaced) < len(spaced)


@pytest.mark.parametrize("seed", range(5))
def test_regex_choice_and_grammars_are_obeyed(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, seed: int
) -> None:
    gbnf = 'root ::= "yes" | "no " num\nnum ::= [0-9]+ ("." [0-9]{1,3})?\n'
    lark = 'start: "<" word ("," word)* ">"\nword: /[a-f]{1,3}/\n'
    choices = ["Beijing", 'the "other" one', "北京"]
    for params, ok in [
        (StructuredOutputsParams(regex=r"^[A-Z]{2,3}/\d{2}$"), r"[A-Z]{2,3}/\d{2}"),
        (StructuredOutputsParams(regex=r"^w\.[a-c]{1,3}\$\/?$\n"), r"w\.[a-c]{1,3}\$/?\n"),
        (StructuredOutputsParams(grammar=gbnf), r"yes|no \d+(\.\d{1,3})?"),
        (StructuredOutputsParams(grammar=lark), r"<[a-f]{1,3}(,[a-f]{1,3})*>"),
        (StructuredOutputsParams(choice=choices), "|".join(re.escape(c) for c in choices)),
    ]:
        text = generate(backend, tokenizer, backend.compile(params, {}), seed, limit=120)
        assert text is None or re.fullmatch(ok, text)


def test_structural_tag_constrains_only_inside_the_tag(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tag = {
        "structures": [{"begin": "<call=f>", "schema": schema, "end": "</call>"}],
        "triggers": ["<call="],
    }
    compiled = backend.compile(StructuredOutputsParams(structural_tag=json.dumps(tag)), {})

    def fits(text: str) -> bool:
        tokens = tokenizer.encode(text).ids
        return backend.matcher(compiled).accept(tokens) == len(tokens)

    assert fits('any text <call=f>{"x": 1}</call> and more')
    assert not fits("any text <call=g>")
    assert not fits('<call=f>{"y": 1}')


def test_rollback_returns_to_the_state_before(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    compiled = backend.compile(StructuredOutputsParams(regex="(abc|abd)e+"), {})
    matcher = backend.matcher(compiled)
    masks = []
    mask = np.zeros((VOCAB + 31) // 32, dtype=np.int32)
    tokens = [tokenizer.token_to_id(c) for c in "abcee"]
    for token in tokens:
        matcher.fill_mask(mask)
        masks.append(mask.copy())
        assert matcher.accept([token]) == 1
    matcher.rollback(3)
    matcher.fill_mask(mask)
    assert (mask == masks[2]).all()
    assert matcher.accept([tokenizer.token_to_id("d"), tokenizer.token_to_id("x")]) == 1
    matcher.rollback(1)
    assert matcher.accept(tokens[2:]) == 3


def test_end_of_text_is_the_only_token_after_the_end(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    matcher = backend.matcher(backend.compile(StructuredOutputsParams(choice=["ab"]), {}))
    mask = np.zeros((VOCAB + 31) // 32, dtype=np.int32)
    matcher.fill_mask(mask)
    assert EOS not in allowed(mask)
    assert matcher.accept([EOS]) == 0
    word = tokenizer.encode("ab").ids
    assert matcher.accept([*word, EOS, EOS]) == len(word) + 2
    assert matcher.is_finished()
    matcher.fill_mask(mask)
    assert allowed(mask).tolist() == [EOS]
    matcher.rollback(2 + len(word))
    assert not matcher.is_finished()
    assert matcher.accept(word) == len(word)


def test_a_model_narrower_than_its_tokenizer_still_works(tokenizer_json: str) -> None:
    narrow = LLGuidanceBackend(tokenizer_json, 261, [EOS])
    matcher = narrow.matcher(narrow.compile(StructuredOutputsParams(json_object=True), {}))
    mask = np.zeros(9, dtype=np.int32)
    matcher.fill_mask(mask)
    assert allowed(mask).size > 0 and allowed(mask).max() < 261


def test_copies_of_one_grammar_do_not_share_state(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    compiled = backend.compile(StructuredOutputsParams(choice=["ab", "cd"]), {})
    first, second = backend.matcher(compiled), backend.matcher(compiled)
    assert first.accept([tokenizer.token_to_id("a")]) == 1
    assert second.accept([tokenizer.token_to_id("c")]) == 1


@pytest.mark.parametrize(
    ("params", "word"),
    [
        (StructuredOutputsParams(json={"type": "strng"}), "strng"),
        (StructuredOutputsParams(json={"not": {"type": "null"}}), "not"),
        (StructuredOutputsParams(json='{"type": '), "JSON"),
        (StructuredOutputsParams(json="[1]"), "object"),
        (StructuredOutputsParams(json={"$ref": "https://example.com/x.json"}), "same schema"),
        (StructuredOutputsParams(json={"$ref": "#"}), "itself"),
        (
            StructuredOutputsParams(
                json={
                    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                    "$ref": "#/$defs/a",
                }
            ),
            "itself",
        ),
        (StructuredOutputsParams(json={"type": "number", "minimum": float("nan")}), "JSON"),
        (StructuredOutputsParams(regex="(unclosed"), "regex"),
        (StructuredOutputsParams(regex="(?=ahead)a"), "look"),
        (StructuredOutputsParams(regex="(" * 65 + "a" + ")" * 65), "levels"),
        (StructuredOutputsParams(regex="a{20000}"), "repeats"),
        (StructuredOutputsParams(regex="((a{100}){100}){100}"), "nested repetitions"),
        (StructuredOutputsParams(regex="|".join("a" * 3000)), "alternatives"),
        (StructuredOutputsParams(regex="a" * 20000), "bytes"),
        (StructuredOutputsParams(regex="\ud800"), "Unicode"),
        (StructuredOutputsParams(choice=["a"] * 2000), "list"),
        (StructuredOutputsParams(choice=[""]), "choice"),
        (StructuredOutputsParams(grammar='root ::= ("a"'), "EBNF"),
        (StructuredOutputsParams(grammar="start: missing"), "missing"),
        (StructuredOutputsParams(structural_tag="{}"), "structures"),
        (StructuredOutputsParams(json={"allOf": [{"type": "null"}, {"type": "string"}]}), "json"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_impossible_constraints_are_refused_by_name(
    backend: LLGuidanceBackend, params: StructuredOutputsParams, word: str
) -> None:
    with pytest.raises(InvalidRequest, match=word) as caught:
        backend.compile(params, {})
    assert caught.value.param == f"structured_outputs.{params.kind}"


def test_a_deep_schema_is_refused_without_recursion(backend: LLGuidanceBackend) -> None:
    schema: dict = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="levels"):
        backend.compile(StructuredOutputsParams(json=schema), {})
    with pytest.raises(InvalidRequest, match="levels"):
        backend.compile(StructuredOutputsParams(json='{"items":' * 1500), {})


@pytest.mark.parametrize(
    "rules",
    [
        """a: a a a | a a | "a" | "b" | "c" """,
        """a: a a a a a a | a a a a a | a a a a | a a a | a a | "a" | "b" | "e" """,
        """a: b c | c b | a b | b a | a a a
b: a c | c a | b b | "x" | /[a-z]/
c: a b | b a | c c | "y" | /[ a-z]/""",
    ],
)
def test_no_mask_of_an_ambiguous_grammar_takes_long(backend: LLGuidanceBackend, rules: str) -> None:
    grammar = StructuredOutputsParams(grammar=f"start: a\n{rules}\n")
    draw, took_s = random.Random(1), [0.0]
    mask = np.zeros((VOCAB + 31) // 32, dtype=np.int32)
    with contextlib.suppress(InvalidRequest):  # too complex, at once or after some tokens
        matcher = backend.matcher(backend.compile(grammar, {}))
        for _ in range(300):
            began = time.thread_time()
            try:
                matcher.fill_mask(mask)
                matcher.accept([draw.choice(allowed(mask).tolist())])
            finally:
                took_s.append(time.thread_time() - began)
    assert sorted(took_s)[-3:][0] < 0.1  # a machine that stands still may be charged to two
