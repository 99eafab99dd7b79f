"""A whole engine over captured steps: the same tokens as over steps that are not captured, whatever
the engine does beside (caching, chunking, preempting, swapping, overlapping)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from fastdeploy_core.config import GraphConfig
from tests.cpu.engine_mixes import (
    Bench,
    Settings,
    answers_alone,
    check,
    check_poisoned_step,
    make_requests,
)
from tests.worker_steps import sharpen, write_model

NUM_MIXES = 12


@pytest.fixture(scope="module")
def benches(
    tmp_path_factory: pytest.TempPathFactory, tensor_library: str
) -> Iterator[tuple[Bench, Bench]]:
    """The same model, with and without captured graphs."""
    checkpoint = write_model(tmp_path_factory.mktemp("llama"))

    def make(graphs: GraphConfig) -> Bench:
        bench = Bench(checkpoint, tensor_library, graphs, load_format="dummy")
        sharpen(bench.worker)
        return bench

    captured, eager = make(GraphConfig(sizes=(1, 2, 4, 8))), make(GraphConfig(enabled=False))
    yield captured, eager
    for bench in (captured, eager):
        bench.worker.close()


def test_random_mixes_give_the_tokens_of_each_request_alone(benches: tuple[Bench, Bench]) -> None:
    captured, eager = benches
    requests = make_requests(Random(5), 14)
    alone = answers_alone(eager, requests)
    steps = preemptions = replays = 0
    for seed in range(NUM_MIXES):
        random = Random(seed)
        settings = replace(Settings.random(random), overlap=seed % 3 > 0)
        chosen = random.sample(requests, random.randrange(4, 9))
        core, collector = captured.run(settings, [(random.randrange(10), r) for r in chosen])
        check(collector, chosen, alone)
        steps += core.stats().steps_total
        preemptions += core.stats().preemptions_total
        replays += captured.num_replays  # each engine allocates its cache, and captures anew
    assert preemptions > 5 and replays > steps / 4


@pytest.mark.parametrize("overlap", [False, True])
def test_request_that_breaks_a_step_fails_alone(
    benches: tuple[Bench, Bench], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, eager = benches
    requests = make_requests(Random(9), 6)
    check_poisoned_step(captured, requests, answers_alone(eager, requests), overlap, monkeypatch)
    assert captured.num_replays > 5
