"""Speculative steps that go ahead of their results give the tokens that come without speculation.

On a device that records steps: drafts, positions and the number of right drafts stay there, and the host
finds out later. Sequences end, are aborted and preempted meanwhile.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.cpu.engine_mixes import Settings
from tests.cpu.speculative_mixes import (
    DetailCollector,
    SpeculativeBench,
    SpoilsDevice,
    answers_alone,
    check,
    make_free_requests,
)
from tests.worker_steps import write_model

NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), with_tokenizer=True)


@pytest.fixture(scope="module")
def world(folder: Path, tensor_library: str) -> tuple[list[Any], DetailCollector]:
    """Requests, and their answers without speculation."""
    plain = SpeculativeBench(folder, tensor_library)
    requests = make_free_requests(Random(5), NUM_REQUESTS, plain.vocab_size)
    return requests, answers_alone(plain, requests)


OPTIONS: dict[str, dict[str, Any]] = {"ngram_match": {"min_ngram_size": 1}, "draft_model": {}}


@pytest.fixture(scope="module", params=OPTIONS)
def bench(folder: Path, tensor_library: str, request: pytest.FixtureRequest) -> SpeculativeBench:
    """Drafts by the target's double, every third of them spoilt, or by n-grams on the device."""
    method = request.param
    options = OPTIONS[method] or {"model": str(folder)}
    made = SpeculativeBench(folder, tensor_library, method, options, captures=True, processors=())
    if method == "ngram_match":
        return made
    drafter, xp = made.speculation._drafter, made.worker.device.xp
    made.speculation._drafter = SpoilsDevice(drafter, xp, made.vocab_size)
    return made


def run_mix(bench: SpeculativeBench, world: Any, seed: int, seen: Counter[str]) -> None:
    requests, truth = world
    random = Random(seed)
    settings = replace(Settings.random(random), overlap=True, max_num_seqs=random.choice([2, 5, 8]))
    chosen = random.sample(requests, random.randrange(2, 9))
    varied = random if random.random() < 0.5 else None
    before = bench._executor.num_ahead, bench._executor.num_steps
    arrivals = [(random.choice([0, 0, random.randrange(12)]), r) for r in chosen]
    core, collector = bench.run_varied(settings, arrivals, varied)
    check(collector, chosen, truth)
    stats = core.stats()
    assert sum(stats.accepted_drafts_at_total) == stats.accepted_draft_tokens_total
    assert stats.accepted_draft_tokens_total <= stats.draft_tokens_total
    seen["ahead"] += bench._executor.num_ahead - before[0]
    seen["steps"] += bench._executor.num_steps - before[1]
    seen["accepted"] += stats.accepted_draft_tokens_total
    seen["refused"] += stats.draft_tokens_total - stats.accepted_draft_tokens_total
    seen["preemptions"] += stats.preemptions_total
    seen["failures"] += stats.draft_failures_total


@pytest.mark.parametrize(
    "num_mixes", [7, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
def test_steps_ahead_of_results_change_no_token(
    bench: SpeculativeBench, world: Any, num_mixes: int
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(num_mixes):
        run_mix(bench, world, seed, seen)
    assert seen["ahead"] > seen["steps"] // 6, seen
    assert seen["accepted"] > 2 * num_mixes and seen["refused"] > 4 * num_mixes
    assert seen["preemptions"] and not seen["failures"]
