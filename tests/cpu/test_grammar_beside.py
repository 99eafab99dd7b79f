"""Masks of grammars that are computed beside the steps: who waits for them, and who does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from fd_grammar_llguidance import matcher as module
from fd_grammar_llguidance.backend import LLGuidanceBackend
from fd_grammar_llguidance.matcher import Grammar
from llguidance import LLMatcher

from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.types import Request, StructuredOutputsParams
from tests.cpu.engine_mixes import Settings, play
from tests.cpu.speculative_mixes import SpeculativeBench
from tests.null_engine import Collector, make_request
from tests.worker_steps import EOS, write_model

MAX_STEPS = 20_000


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tensor_library: str) -> SpeculativeBench:
    folder = write_model(tmp_path_factory.mktemp("model"), with_tokenizer=True)
    return SpeculativeBench(folder, tensor_library, sharp=False)


def constrained(bench: SpeculativeBench, name: str, tokens: int = 24, **params: Any) -> Request:
    path = bench.config.model.path / "tokenizer.json"
    backend = LLGuidanceBackend(str(path), bench.vocab_size, [EOS])
    request = make_request(name, [5, 6, 7], max_tokens=tokens, ignore_eos=True)
    request.eos_token_ids = [EOS]
    request.grammar = backend.compile(StructuredOutputsParams(**params), {})
    request.grammar_backend = "llguidance"
    return request


def slowed(
    monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object], after: int = 1
) -> list[bool]:
    """Masks computed beside the steps wait for something first, from the `after`-th on; returns
    whether each was."""
    real, seen = Grammar.compute, list[bool]()

    def compute(grammar: Grammar, matcher: LLMatcher) -> tuple[float, np.ndarray]:
        is_beside = threading.current_thread().name.startswith("fd-masks")
        seen.append(is_beside)
        if is_beside and seen.count(True) >= after:
            wait()
        return real(grammar, matcher)

    monkeypatch.setattr(Grammar, "compute", compute)
    return seen


def step_until(core: EngineCore, collector: Collector, done: Callable[[], bool]) -> None:
    for _ in range(MAX_STEPS):
        if done():
            return
        collector.take(core.step())
    raise AssertionError("it did not come to that")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_mask_that_does_not_come_holds_up_its_own_row_alone(
    bench: SpeculativeBench, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(max_num_seqs=8, overlap=overlap)
    hostile = constrained(bench, "hostile", regex="[a-c]{30,40}")
    others = [make_request(f"r{n}", [5 + n, 9], max_tokens=40, ignore_eos=True) for n in range(3)]
    _, alone = bench.run(settings, [(0, r) for r in (hostile, *others)])

    monkeypatch.setattr(module, "TRUSTED_AFTER", 10**9)
    comes = threading.Event()
    slowed(monkeypatch, comes.wait, after=3)
    core, collector = bench.engine(settings), Collector()
    for request in (hostile, *others):
        core.add(request)
    step_until(core, collector, lambda: len(collector.finished) == len(others))
    assert "hostile" not in collector.finished
    before = len(collector.tokens["hostile"][0])
    assert before < 8, "it waits for a mask"
    for _ in range(20):  # nothing else to do: no error, however long that takes
        collector.take(core.step())
    assert core.has_work() and len(collector.tokens["hostile"][0]) == before
    comes.set()
    step_until(core, collector, lambda: not core.has_work())
    core.scheduler.check_idle()
    bench._num_seq_ids = core.scheduler._next_seq_id
    assert not collector.errors
    for request in (hostile, *others):
        assert collector.answers(request.request_id) == alone.answers(request.request_id)


def test_a_quick_grammar_is_trusted_and_a_slow_one_is_not(
    bench: SpeculativeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(max_num_seqs=8, overlap=True)
    seen = slowed(monkeypatch, lambda: None)
    bench.run(settings, [(0, constrained(bench, "quick", regex="[a-d]{30,40}"))])
    assert seen[0] is False, "built before the request runs"
    assert seen.count(True) == module.TRUSTED_AFTER - 1, "the first mask counts, too"
    assert not any(seen[module.TRUSTED_AFTER :]), "steps wait for the others"
    seen.clear()
    monkeypatch.setattr(module, "QUICK_S", -1.0)
    bench.run(settings, [(0, constrained(bench, "slow", regex="[a-e]{30,40}"))])
    assert len(seen) > 20 and all(seen[1:])


def test_one_that_leaves_while_its_mask_is_computed_leaves_nothing(
    bench: SpeculativeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    comes = threading.Event()
    slowed(monkeypatch, comes.wait)
    core, collector = bench.engine(Settings(max_num_seqs=8, overlap=True)), Collector()
    core.add(constrained(bench, "gone", regex="[a-f]{30,40}"))
    step_until(core, collector, lambda: "gone" in collector.tokens)
    core.abort(["gone"])
    play(core, [(0, make_request("next", [5, 9], max_tokens=4))], collector)
    comes.set()
    core.scheduler.check_idle()
    bench._num_seq_ids = core.scheduler._next_seq_id
    assert len(collector.answers("next")[0]) == 4


def test_what_cannot_be_built_fails_its_own_request(bench: SpeculativeBench) -> None:
    broken = constrained(bench, "broken", regex="[a-g]+")
    broken.grammar = b"no grammar"
    empty = constrained(bench, "empty", tokens=0, regex="[a-g]+")
    other = make_request("other", [5, 9], max_tokens=4)
    _, collector = bench.run(Settings(max_num_seqs=8), [(0, r) for r in (broken, empty, other)])
    assert set(collector.errors) == {"broken"}
    assert len(collector.answers("other")[0]) == 4


class Panic(BaseException):
    """As what pyo3 raises for a panic of Rust's."""


@pytest.mark.parametrize("method", ["accept", "fill_mask", "is_finished", "begin_mask", "is_ready"])
@pytest.mark.parametrize("kind", [ValueError, SystemExit, Panic])
def test_a_matcher_that_ends_the_process_ends_its_own_request(
    bench: SpeculativeBench,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    kind: type[BaseException],
) -> None:
    def fail(*_: object) -> None:
        raise kind("bye")

    broken = constrained(bench, "broken", regex="[a-g]+")
    other = make_request("other", [5, 9], max_tokens=4)
    monkeypatch.setattr(module.LLGuidanceMatcher, method, fail)
    _, collector = bench.run(Settings(max_num_seqs=8), [(0, broken), (0, other)])
    is_beside = method in ("begin_mask", "is_ready")  # what they say costs time, not the answer
    assert set(collector.errors) == (set() if is_beside else {"broken"})
    assert len(collector.answers("other")[0]) == 4


def test_masks_beside_change_no_token(
    bench: SpeculativeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[dict[str, Any]] = [
        {"regex": "[a-h]{4,40}"},
        {"choice": ["Beijing", "Paris, I think"]},
        {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    ]
    requests = [constrained(bench, f"c{n}", 4 + n, **kinds[n % 3]) for n in range(9)]
    monkeypatch.setattr(module, "TRUSTED_AFTER", 0)
    alone = {r.request_id: bench.run(Settings(), [(0, r)])[1] for r in requests}
    monkeypatch.setattr(module, "TRUSTED_AFTER", 10**9)
    for seed in range(6):
        random = Random(seed)
        settings = Settings.random(random)
        _, collector = bench.run(settings, [(random.randrange(10), r) for r in requests])
        for name, expected in alone.items():
            assert collector.answers(name) == expected.answers(name), settings
            assert collector.errors.get(name) == expected.errors.get(name)
