"""The same tokens whatever the engine does: caching, chunking, batching, preempting, swapping,
overlapping, dividing among ranks. Float32, greedy and seeded sampling, over random request
mixes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from fastdeploy_core.engine.client import LocalEngine
from tests.checkpoints import build
from tests.cpu.engine_mixes import (
    Bench,
    Settings,
    answers_alone,
    check,
    check_poisoned_step,
    make_engine_config,
    make_requests,
    play,
)

# Models of which layers alone differ; those are compared elsewhere.
VARIANTS = ("ernie-moe", pytest.param("qwen3", marks=pytest.mark.slow))
NUM_MIXES = (15, pytest.param(110, marks=[pytest.mark.slow, pytest.mark.timeout(900)]))  # per model
NUM_RANK_MIXES = (3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)]))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoints"), ["ernie-moe", "qwen3"])


@pytest.fixture(scope="module", params=VARIANTS)
def bench(request: pytest.FixtureRequest, checkpoints: Path, tensor_library: str) -> Bench:
    return Bench(checkpoints / request.param, tensor_library)


@pytest.mark.parametrize("num_mixes", NUM_MIXES)
def test_random_mixes_give_the_tokens_of_each_request_alone(bench: Bench, num_mixes: int) -> None:
    requests = make_requests(Random(5), 40)
    alone = answers_alone(bench, requests)
    seen: Counter[str] = Counter()
    for seed in range(num_mixes):
        random = Random(seed)
        settings = Settings.random(random)
        chosen = random.sample(requests, random.randrange(4, 9))
        core, collector = bench.run(settings, [(random.randrange(10), r) for r in chosen])
        check(collector, chosen, alone)
        stats = core.stats()
        seen["preemptions"] += stats.preemptions_total
        seen["prefix hits"] += stats.prefix_hit_tokens_total
        seen["host hits"] += stats.host_hit_tokens_total
        seen["shared steps"] += stats.step_sequences_total > stats.steps_total
        seen["overlap"] += core.info.overlap
    assert seen["preemptions"] > num_mixes // 2 and seen["host hits"] > num_mixes // 2
    assert seen["prefix hits"] > 5 * num_mixes and seen["shared steps"] > num_mixes // 2
    assert num_mixes // 4 < seen["overlap"] < num_mixes


def test_each_way_of_running_alone_gives_the_same_tokens(bench: Bench) -> None:
    """One change at a time, so that a failure above has a name."""
    requests = make_requests(Random(6), 8)
    alone = answers_alone(bench, requests)
    many = {"max_num_seqs": 8}
    for settings in (
        Settings(**many),
        Settings(**many, prefix_caching=True),
        Settings(**many, chunked_prefill=True, max_num_batched_tokens=8),
        Settings(**many, num_blocks=14),
        Settings(**many, num_blocks=14, prefix_caching=True, host_blocks=40),
        Settings(**many, overlap=True),
        Settings(**many, overlap=True, num_blocks=14, prefix_caching=True, host_blocks=6),
    ):
        _, collector = bench.run(settings, [(0, request) for request in requests])
        check(collector, requests, alone)


def test_sampled_answers_differ_between_seeds_and_branches(bench: Bench) -> None:
    """Control: equality above would mean little if the seed did not matter."""
    (request,) = make_requests(Random(8), 2)[1:]
    request.sampling.n, request.sampling.temperature, request.sampling.top_k = 3, 1.3, 0
    request.sampling.max_tokens, request.sampling.ignore_eos = 16, True
    answers = []
    for seed in (1, 2):
        request.sampling.seed = seed
        _, collector = bench.run(Settings(max_num_seqs=4), [(0, request)])
        answers += collector.answers(request.request_id)
    assert len({tuple(tokens) for tokens in answers}) == 6


@pytest.mark.parametrize("overlap", [False, True])
def test_request_that_breaks_a_step_fails_alone(
    bench: Bench, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(Random(9), 6)
    check_poisoned_step(bench, requests, answers_alone(bench, requests), overlap, monkeypatch)


@pytest.mark.parametrize("num_mixes", NUM_RANK_MIXES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_give_the_tokens_of_one(
    checkpoints: Path, variant: str, tensor_library: str, num_mixes: int
) -> None:
    bench = Bench(checkpoints / variant, tensor_library)
    requests = make_requests(Random(7), 12)
    alone = answers_alone(bench, requests)
    config, resolved = make_engine_config(checkpoints / variant, tensor_library, num_ranks=2)
    settings = Settings(
        prefix_caching=True,
        chunked_prefill=True,
        max_num_batched_tokens=17,
        max_num_seqs=5,
        num_blocks=18,
        host_blocks=20,
        overlap=True,
    )
    engine = LocalEngine(settings.apply(config, bench.block_bytes), resolved)
    try:
        for seed in range(num_mixes):
            random = Random(seed)
            chosen = random.sample(requests, random.randrange(3, 7))
            collector = play(engine, [(random.randrange(8), r) for r in chosen])
            check(collector, chosen, alone)
        assert engine.stats().preemptions_total > 0
    finally:
        engine.close()
