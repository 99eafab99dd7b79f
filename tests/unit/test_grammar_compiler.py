"""The compiler's children: what hangs, dies or eats memory costs one request and nothing else."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fastdeploy_core.config import StructuredOutputsConfig
from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.grammar import GrammarCompiler
from fastdeploy_core.grammar import compiler as module
from fastdeploy_core.grammar.llguidance_backend import LLGuidanceBackend
from fastdeploy_core.types import StructuredOutputsParams

HOSTILE = '''
import os
import numpy
from fastdeploy_core.errors import InvalidRequest

class Backend:
    """Does to its process what the regex says."""

    name = "hostile"
    contract = (1, 0)

    def __init__(self, tokenizer_json, vocab_size, eos_token_ids):
        if vocab_size == 13:
            raise ValueError("no tokenizer for you")

    def compile(self, params, options):
        word = params.regex
        if word == "hang":
            while True:
                pass
        if word == "eat":
            hoard = []
            while True:
                hoard.append(numpy.empty(1 << 28, dtype="uint8"))
        if word == "die":
            os._exit(3)
        if word == "raise":
            raise RuntimeError("secret /path/to/thing 0xdeadbeef")
        if word == "print":
            print("noise on standard output")
        if word == "refuse":
            raise InvalidRequest("structured_outputs.regex cannot be used: told to", param="x")
        return f"{word} {os.getpid()}".encode()
'''


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


@pytest.fixture
def hostile(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GrammarCompiler]:
    (tmp_path / "hostile_grammar.py").write_text(HOSTILE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = GrammarCompiler.start(
        tokenizer_folder,
        vocab_size=300,
        eos_token_ids=[1],
        config=StructuredOutputsConfig(compile_timeout_s=1.0),
        target="hostile_grammar:Backend",
    )
    yield made
    made.close()


def regex(pattern: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=pattern)


def pid(compiled: bytes) -> int:
    return int(compiled.split()[1])


def test_the_real_backend_compiles_in_a_child_and_the_worker_reads_it(
    tokenizer_folder: Path,
) -> None:
    made = GrammarCompiler.start(tokenizer_folder, vocab_size=300, eos_token_ids=[1])
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


@pytest.mark.parametrize(
    ("pattern", "reason"), [("hang", "longer than 1 s"), ("eat", "memory"), ("die", "memory")]
)
def test_a_compilation_gone_wrong_is_refused_and_the_next_one_works(
    hostile: GrammarCompiler, pattern: str, reason: str
) -> None:
    first = pid(hostile.compile(regex("good")))
    with pytest.raises(InvalidRequest, match=reason):
        hostile.compile(regex(pattern))
    assert pid(hostile.compile(regex("good2"))) > 0
    if pattern != "eat":  # a caught MemoryError leaves the process alive
        assert not Path(f"/proc/{first}").exists() or os.getpid() == first


def test_another_request_compiles_while_one_hangs(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_grammar.py").write_text(HOSTILE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = GrammarCompiler.start(
        tokenizer_folder,
        config=StructuredOutputsConfig(compile_timeout_s=60.0),
        target="hostile_grammar:Backend",
    )
    made.compile(regex("warm"))
    errors: list[Exception] = []

    def hang() -> None:
        try:
            made.compile(regex("hang"))
        except InvalidRequest as error:
            errors.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    while made._idle.qsize() == module.NUM_CHILDREN:
        time.sleep(0.01)
    assert made.compile(regex("meanwhile")).startswith(b"meanwhile")
    assert thread.is_alive(), "the other one is still within its time limit"
    made.close()
    thread.join(30)
    assert len(errors) == 1


def test_refusals_are_remembered_so_repeating_them_is_cheap(hostile: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest):
        hostile.compile(regex("hang"))
    began = time.monotonic()
    for _ in range(5):
        with pytest.raises(InvalidRequest, match="longer"):
            hostile.compile(regex("hang"))
    assert time.monotonic() - began < 0.9, "five repeats took as long as one compilation"


def test_errors_of_the_library_do_not_leak_to_the_client(hostile: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest) as caught:
        hostile.compile(regex("raise"))
    assert "RuntimeError" in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidRequest, match="told to") as caught:
        hostile.compile(regex("refuse"))
    assert caught.value.param == "x"


def test_a_printing_library_does_not_break_the_protocol(hostile: GrammarCompiler) -> None:
    assert hostile.compile(regex("print")).startswith(b"print")


def test_results_are_cached_and_the_cache_is_bounded(
    hostile: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CACHE_ENTRIES", 8)
    answers = [hostile.compile(regex(f"p{i}")) for i in range(40)]
    assert len(hostile._cache) == 8
    assert hostile.compile(regex("p39")) == answers[39]
    monkeypatch.setattr(module, "MAX_CACHE_BYTES", 600)
    for i in range(40):
        hostile.compile(regex(f"q{i}"))
    assert hostile._cache.num_bytes <= 600


def test_many_compile_at_once_from_an_event_loop(hostile: GrammarCompiler) -> None:
    async def run() -> list[bytes]:
        return await asyncio.gather(*(hostile.compile_async(regex(f"r{i}")) for i in range(20)))

    answers = asyncio.run(run())
    assert [a.split()[0] for a in answers] == [f"r{i}".encode() for i in range(20)]


def test_turned_off_means_refused(tokenizer_folder: Path) -> None:
    off = GrammarCompiler.start(tokenizer_folder, config=StructuredOutputsConfig(backend="off"))
    with pytest.raises(InvalidRequest, match="turned off"):
        off.compile(regex("a"))
    off.close()


def test_a_backend_that_cannot_start_says_why(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_grammar.py").write_text(HOSTILE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = GrammarCompiler.start(tokenizer_folder, vocab_size=13, target="hostile_grammar:Backend")
    with pytest.raises(ConfigError, match="no tokenizer for you"):
        made.compile(regex("a"))
    made.close()


def test_no_process_survives_close(hostile: GrammarCompiler) -> None:
    child = pid(hostile.compile(regex("good")))
    hostile.close()
    assert not Path(f"/proc/{child}").exists()
    with pytest.raises(InvalidRequest, match="closed"):
        hostile.compile(regex("other"))


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
    made = GrammarCompiler.start(tokenizer_folder, vocab_size=300, eos_token_ids=[1])
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
