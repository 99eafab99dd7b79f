"""The compiler's children: what hangs, dies or eats memory costs one request and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fastdeploy_core.config import StructuredOutputsConfig
from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.grammar import compiler as module
from fastdeploy_core.grammar.compiler import GrammarCompiler
from fastdeploy_core.plugins.discovery import PluginEntry
from fastdeploy_core.serving.http.errors import to_api_error
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
            raise KeyError("no tokenizer for you")

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


BACKEND = PluginEntry(
    "grammar", "hostile", "fastdeploy.grammars", "hostile_grammar:Backend", "fd-hostile", "1.0"
)


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
        BACKEND,
        vocab_size=300,
        eos_token_ids=[1],
        config=StructuredOutputsConfig(compile_timeout_s=1.0),
    )
    yield made
    made.close()


def regex(pattern: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=pattern)


def pid(compiled: bytes) -> int:
    return int(compiled.split()[1])


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
        tokenizer_folder, BACKEND, config=StructuredOutputsConfig(compile_timeout_s=60.0)
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


def test_refusals_are_remembered_so_repeating_them_is_cheap(
    hostile: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest):
        hostile.compile(regex("hang"))
    monkeypatch.setattr(hostile, "_ask", None)  # no process is asked again
    with pytest.raises(InvalidRequest, match="longer"):
        hostile.compile(regex("hang"))


def test_a_child_that_gets_no_processor_is_not_slow(hostile: GrammarCompiler) -> None:
    child = pid(hostile.compile(regex("good")))
    os.kill(child, signal.SIGSTOP)
    go_on = threading.Timer(2.0, os.kill, (child, signal.SIGCONT))  # twice the time limit
    go_on.start()
    assert pid(hostile.compile(regex("late"))) == child
    go_on.join()


def test_one_that_sleeps_for_ever_is_ended(
    hostile: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = pid(hostile.compile(regex("good")))
    monkeypatch.setattr(module, "IDLE_FACTOR", 1)
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(InvalidRequest, match="longer than 1 s"):
        hostile.compile(regex("late"))
    assert not Path(f"/proc/{child}").exists()


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
    monkeypatch.setattr(module, "MAX_CACHED", 8)
    answers = [hostile.compile(regex(f"p{i}")) for i in range(40)]
    assert len(hostile._cache) == 8
    assert hostile.compile(regex("p39")) == answers[39]
    hostile.compile(regex("q" * module.MAX_CACHED_BYTES))
    assert max(map(len, hostile._cache)) < 100, "what is large is not kept"


def test_many_compile_at_once_from_an_event_loop(hostile: GrammarCompiler) -> None:
    async def run() -> list[bytes]:
        return await asyncio.gather(*(hostile.compile_async(regex(f"r{i}")) for i in range(20)))

    answers = asyncio.run(run())
    assert [a.split()[0] for a in answers] == [f"r{i}".encode() for i in range(20)]


@pytest.mark.parametrize(
    ("backend", "words"),
    [("off", "turned off on this server"), ("auto", "pip install fd-grammar-llguidance")],
)
def test_without_a_backend_a_constraint_is_refused_with_what_to_do(
    tokenizer_folder: Path, backend: str, words: str
) -> None:
    config = StructuredOutputsConfig(backend=backend)
    none = GrammarCompiler.start(tokenizer_folder, None, config=config)
    with pytest.raises(InvalidRequest, match=words):
        none.compile(regex("a"))
    none.close()


def test_a_constraint_too_deep_to_be_sent_to_the_child_is_refused(hostile: GrammarCompiler) -> None:
    deep: dict = {}
    for _ in range(100_000):
        deep = {"not": deep}
    with pytest.raises(InvalidRequest, match="nests more than 64 levels"):
        hostile.compile(StructuredOutputsParams(json=deep))
    assert hostile.compile(regex("good"))


@pytest.mark.parametrize(
    ("target", "contract", "words"),
    [
        ("hostile_grammar:NoSuchClass", (1, 0), "NoSuchClass"),
        ("hostile_grammar:Backend", (9, 0), "contract 9.0"),
    ],
)
def test_a_backend_that_cannot_be_loaded_says_why(
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    contract: tuple[int, int],
    words: str,
) -> None:
    text = HOSTILE.replace("contract = (1, 0)", f"contract = {contract}")
    (tmp_path / "hostile_grammar.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = GrammarCompiler.start(tokenizer_folder, replace(BACKEND, target=target))
    with pytest.raises(ConfigError, match=words):
        made.compile(regex("a"))
    monkeypatch.setattr(subprocess, "Popen", None)  # a request must not cost a process each
    with pytest.raises(ConfigError, match=words) as refused:
        made.compile(regex("b"))
    assert to_api_error(refused.value).status == 501, "no failure of the server"
    made.close()


def test_a_backend_that_cannot_start_says_why(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_grammar.py").write_text(HOSTILE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = GrammarCompiler.start(tokenizer_folder, BACKEND, vocab_size=13)
    with pytest.raises(ConfigError, match=r"hostile cannot be built: KeyError: .*for you"):
        made.compile(regex("a"))
    made.close()


def test_no_process_survives_close(hostile: GrammarCompiler) -> None:
    child = pid(hostile.compile(regex("good")))
    hostile.close()
    assert not Path(f"/proc/{child}").exists()
    with pytest.raises(InvalidRequest, match="closed"):
        hostile.compile(regex("other"))
