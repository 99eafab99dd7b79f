"""The same tokens with every speculative method as without, whatever else is switched on.

Float32, greedy and seeded sampling, with penalties, bad words, grammars, processors, thinking
budgets, log-probabilities, n > 1, prefix cache, chunking, preemption, overlap, a number of drafts
that changes from step to step, and two ranks.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fastdeploy_core.config import ParallelConfig, SpeculativeConfig
from fastdeploy_core.engine.client import LocalEngine
from fastdeploy_core.engine.selection import resolve_plugins
from tests.cpu.engine_mixes import Settings, play
from tests.cpu.speculative_mixes import (
    DetailCollector,
    Oracle,
    SpeculativeBench,
    SpoilsDevice,
    answers_alone,
    check,
    make_requests,
    whole_texts,
)
from tests.worker_steps import write_model

METHODS = ("oracle", "ngram_match", "suffix", "draft_model")
NUM_REQUESTS = 24
NUM_MIXES = (4, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), with_tokenizer=True)


@pytest.fixture(scope="module")
def world(folder: Path, tensor_library: str) -> tuple[list[Any], DetailCollector]:
    """Requests, and their answers without speculation."""
    plain = SpeculativeBench(folder, tensor_library)
    requests = make_requests(Random(5), NUM_REQUESTS, folder, plain.vocab_size)
    truth = answers_alone(plain, requests)
    assert len(truth.errors) < NUM_REQUESTS // 8, truth.errors
    return requests, truth


def make_bench(
    folder: Path,
    library: str,
    method: str,
    world: tuple[list[Any], DetailCollector],
    *,
    captures: bool = False,
) -> SpeculativeBench:
    """With drafts that are often wrong."""
    options: dict[str, Any] = {"ngram_match": {"min_ngram_size": 1}}.get(method, {})
    if method == "draft_model":
        options = {"model": str(folder)}  # the same numbers, but for `sharpen`
    bench = SpeculativeBench(
        folder,
        library,
        "suffix" if method == "oracle" else method,
        options,
        captures=captures,
    )
    speculation, size = bench.speculation, bench.vocab_size
    if method == "oracle":
        speculation._drafter = Oracle(Random(1), whole_texts(*world), size)
    elif method == "draft_model":
        xp = bench.worker.device.xp
        speculation._drafter = SpoilsDevice(speculation._drafter, xp, size)
    return bench


@pytest.mark.parametrize("method", ["oracle", "draft_model"])
def test_captured_steps_give_the_same_tokens(
    folder: Path, tensor_library: str, world: Any, method: str
) -> None:
    """On a device that records decode steps, drafting included."""
    requests, truth = world
    bench = make_bench(folder, tensor_library, method, world, captures=True)
    accepted = 0
    for seed in range(2):
        random = Random(seed)
        settings = replace(Settings.random(random), max_num_seqs=random.choice([2, 5]))
        chosen = random.sample(requests, 5)
        core, collector = bench.run_varied(settings, [(0, r) for r in chosen], random)
        check(collector, chosen, truth)
        accepted += core.stats().accepted_draft_tokens_total
    assert accepted > 10
    captured = bench.worker.device.recorded
    assert sum(work.num_replays for work in captured) > 50


@pytest.mark.parametrize("captures", [False, True])
def test_benchmark_mode_drafts_and_accepts_nothing(
    folder: Path, tensor_library: str, world: Any, captures: bool
) -> None:
    requests, truth = world
    bench = SpeculativeBench(
        folder,
        tensor_library,
        "ngram_match",
        {"min_ngram_size": 1},
        captures=captures,
        benchmark_mode=True,
    )
    settings = Settings(max_num_seqs=4, prefix_caching=True)
    core, collector = bench.run_varied(settings, [(0, r) for r in requests[:6]], None)
    check(collector, requests[:6], truth)
    stats = core.stats()
    assert stats.draft_tokens_total > 0 == stats.accepted_draft_tokens_total


@pytest.mark.parametrize("num_mixes", NUM_MIXES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_tokens_that_come_without_it(
    folder: Path, tensor_library: str, world: Any, method: str, num_mixes: int
) -> None:
    requests, truth = world
    bench = make_bench(folder, tensor_library, method, world)
    seen: Counter[str] = Counter()
    for seed in range(num_mixes):
        random = Random(seed)
        settings = Settings.random(random)
        chosen = random.sample(requests, random.randrange(4, 9))
        varied = random if random.random() < 0.5 else None
        core, collector = bench.run_varied(
            settings, [(random.randrange(10), r) for r in chosen], varied
        )
        check(collector, chosen, truth)
        stats = core.stats()
        seen["drafted"] += stats.draft_tokens_total
        seen["accepted"] += stats.accepted_draft_tokens_total
        seen["preemptions"] += stats.preemptions_total
        seen["prefix hits"] += stats.prefix_hit_tokens_total
        seen["failures"] += stats.draft_failures_total
        assert sum(stats.accepted_drafts_at_total) == stats.accepted_draft_tokens_total
    assert not seen["failures"] and seen["preemptions"] and seen["prefix hits"]
    # Over many mixes `suffix` comes to know all answers, so it is refused less and less.
    refused = seen["drafted"] - seen["accepted"]
    assert refused > 20 * min(num_mixes, 20), "refusals are exercised"
    if method in ("oracle", "draft_model"):
        assert seen["accepted"] > 10 * num_mixes, "and so are hits"


@pytest.mark.parametrize(
    "method", [pytest.param("ngram_match", marks=pytest.mark.slow), "draft_model"]
)
def test_two_ranks_give_the_tokens_of_one(folder: Path, tensor_library: str, method: str) -> None:
    smaller = write_model(folder.parent / "draft", with_tokenizer=True)
    config_json = json.loads((smaller / "config.json").read_text("utf-8"))
    (smaller / "config.json").write_text(json.dumps(config_json | {"num_hidden_layers": 1}))
    options = {"min_ngram_size": 1} if method == "ngram_match" else {"model": str(smaller)}
    plain = SpeculativeBench(folder, tensor_library, sharp=False)
    requests = make_requests(Random(6), 10, folder, plain.vocab_size)
    truth = answers_alone(plain, requests)
    config = replace(
        plain.config,
        parallel=ParallelConfig(tensor_parallel_size=2),
        speculative=SpeculativeConfig(method, 3, adaptive_length=False, options=options),
    )
    settings = Settings(
        prefix_caching=True,
        chunked_prefill=True,
        max_num_batched_tokens=17,
        max_num_seqs=5,
        num_blocks=18,
        overlap=True,
    )
    config = settings.apply(config, plain.block_bytes)
    engine = LocalEngine(config, resolve_plugins(config))
    try:
        for seed in range(4):
            random = Random(seed)
            chosen = random.sample(requests, random.randrange(4, 8))
            arrivals = [(random.randrange(8), r) for r in chosen]
            check(play(engine, arrivals, DetailCollector()), chosen, truth)
        stats = engine.stats()
        assert stats.draft_tokens_total > stats.accepted_draft_tokens_total > 0
        assert not stats.draft_failures_total
    finally:
        engine.close()
