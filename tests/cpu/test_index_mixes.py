"""A model whose indexer chooses keys through the engine: the same tokens whatever it does, with
prompts and answers longer than what it chooses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from fastdeploy_core.config import GraphConfig
from tests.checkpoints import build
from tests.cpu.engine_mixes import (
    Bench,
    Settings,
    answers_alone,
    check,
    check_captured,
    make_requests,
)

SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("index"), ["deepseek-v32"]) / "deepseek-v32"


@pytest.mark.parametrize("num_mixes", (5, pytest.param(110, marks=SLOW)))
def test_random_mixes_give_the_tokens_of_each_request_alone(
    checkpoint: Path, tensor_library: str, num_mixes: int
) -> None:
    bench = Bench(checkpoint, tensor_library)
    requests = make_requests(Random(5), 16)
    alone, seen = answers_alone(bench, requests), Counter[str]()
    for seed in range(num_mixes):
        random = Random(seed)
        chosen = random.sample(requests, random.randrange(4, 9))
        arrivals = [(random.randrange(10), r) for r in chosen]
        core, collector = bench.run(Settings.random(random), arrivals)
        check(collector, chosen, alone)
        stats = core.stats()
        seen["preemptions"] += stats.preemptions_total
        seen["prefix hits"] += stats.prefix_hit_tokens_total
        seen["shared steps"] += stats.step_sequences_total > stats.steps_total
        seen["long"] += sum(len(r.prompt_token_ids) > 12 for r in chosen)
    assert seen["preemptions"] and seen["prefix hits"] > num_mixes
    assert seen["shared steps"] > num_mixes // 2 and seen["long"] > num_mixes


@pytest.mark.parametrize("num_mixes", (5, pytest.param(110, marks=SLOW)))
def test_captured_steps_give_the_same_tokens(
    checkpoint: Path, tensor_library: str, num_mixes: int
) -> None:
    """Decodes replayed over blocks that hold NaN where nobody wrote."""
    bench = Bench(checkpoint, tensor_library)
    requests = make_requests(Random(6), 14)
    alone = answers_alone(bench, requests)
    captured = Bench(checkpoint, tensor_library, GraphConfig(sizes=(1, 2, 4, 8)))
    seen = check_captured(captured, requests, alone, num_mixes)
    captured.worker.close()
    assert seen["replays"] > seen["steps"] / 4 and seen["preemptions"]
