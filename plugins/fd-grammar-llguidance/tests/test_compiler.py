"""Constraints compiled as the server does it, in the core's killable processes, and walked as the
worker does it: what is hostile compiles or is refused, and harms no other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fd_grammar_llguidance.backend import LLGuidanceBackend
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.grammar.compiler import GrammarCompiler
from fastdeploy_core.plugins.drivers import find
from fastdeploy_core.types import StructuredOutputsParams


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<unk>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["a few words"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def start(tokenizer_folder: Path) -> GrammarCompiler:
    backend = find("grammar", "llguidance")
    return GrammarCompiler.start(tokenizer_folder, backend, vocab_size=300, eos_token_ids=[1])


def regex(pattern: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=pattern)


def test_a_constraint_compiles_in_a_child_and_the_worker_reads_it(
    tokenizer_folder: Path,
) -> None:
    made = start(tokenizer_folder)
    try:
        compiled = made.compile(StructuredOutputsParams(choice=["a", "b"]))
        worker = LLGuidanceBackend(str(tokenizer_folder / "tokenizer.json"), 300, [1])
        tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
        assert made.backend == "llguidance"
        assert worker.matcher(compiled).accept([tokenizer.token_to_id("a"), 1]) == 2
        with pytest.raises(InvalidRequest, match="look"):
            made.compile(regex("(?=a)a"))
    finally:
        made.close()


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


ADVERSARIAL = [
    regex("(a+)+b"),
    regex("(a{1,1000}){1,100}"),
    regex("((a{1,100}){1,100}){1,100}"),
    regex("((a|b|c|ab|bc)*d(.|\\n)*){200}"),
    regex("(.*a.{200}).*(b.{200})"),
    regex("(" * 60 + "a" + ")*" * 60),
    regex("(\\p{L}{1,500}\\w{1,200}){1,1}"),
    regex("(?:" * 64 + ")" * 64),
    regex("[" * 5000),
    regex("a{0,9999}" * 100),
    regex("|".join(f"{i}x*" for i in range(1000))),
    regex("(x+x+)+y" * 50),
    StructuredOutputsParams(json=nested(60)),
    StructuredOutputsParams(json={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    StructuredOutputsParams(
        json={
            "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
            "$ref": "#/$defs/n",
        }
    ),
    StructuredOutputsParams(
        json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}
    ),
    StructuredOutputsParams(
        json={"anyOf": [{"properties": {f"k{j}": {} for j in range(9)}} for i in range(150)]}
    ),
    StructuredOutputsParams(json={"type": "string", "minLength": 100000, "maxLength": 200000}),
    StructuredOutputsParams(json={"type": "array", "minItems": 100000, "items": {"type": "null"}}),
    StructuredOutputsParams(
        json={
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(9)
            ]
        }
    ),
    StructuredOutputsParams(json={"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}),
    StructuredOutputsParams(
        json={"patternProperties": {"^(a|b)*c{1,1000}": {}, "^.*d": {}}, "type": "object"}
    ),
    StructuredOutputsParams(json={"type": "integer", "multipleOf": 999999937, "minimum": 10**17}),
    StructuredOutputsParams(grammar='start: a\na: a a | "x" | a a a\n'),
    StructuredOutputsParams(grammar='start: start start | ""\n'),
    StructuredOutputsParams(grammar='start: (x{0,9000}){0,9000}\nx: "a" | "b"\n'),
    StructuredOutputsParams(grammar="start: a\n" + "".join(f"a: b{i}\n" for i in range(500))),
    StructuredOutputsParams(grammar="root ::= root | root root"),
    StructuredOutputsParams(choice=[f"{'x' * (i % 50)}{i}" for i in range(400)]),
]


def test_hostile_constraints_compile_or_are_refused_and_never_hurt_the_next(
    tokenizer_folder: Path,
) -> None:
    """Whatever the compiler accepts, a worker can walk: a mask, or the end of that request."""
    made = start(tokenizer_folder)
    worker = LLGuidanceBackend(str(tokenizer_folder / "tokenizer.json"), 300, [1])
    good = StructuredOutputsParams(choice=["fine"])
    refused = 0
    try:
        for number, params in enumerate(ADVERSARIAL):
            try:
                walk(worker, made.compile(params), number)
            except InvalidRequest as error:
                refused += 1
                assert len(str(error)) < 1000
            fresh = StructuredOutputsParams(choice=["fine", str(number)])
            assert made.compile(fresh), "the next constraint compiles"
        assert made.compile(good)
    finally:
        made.close()
    assert refused >= 8


def walk(worker: LLGuidanceBackend, compiled: bytes, seed: int) -> None:
    rng, matcher = np.random.default_rng(seed), worker.matcher(compiled)
    mask = np.zeros(10, dtype=np.int32)
    for _ in range(20):
        matcher.fill_mask(mask)
        possible = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert possible.size
        token = int(rng.choice(possible))
        assert matcher.accept([token]) == 1
        if token == 1:
            return
