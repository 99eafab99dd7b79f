"""One thread launches steps, another one reads their results, as the executor does with async
scheduling.

The reader is given every chance to come between the parts of a launch.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from fastdeploy_core.types import SchedulerOutput
from tests.cpu.engine_mixes import LateResult, Settings
from tests.cpu.speculative_mixes import (
    DetailCollector,
    SpeculativeBench,
    answers_alone,
    check,
    make_free_requests,
)
from tests.worker_steps import write_model

World = tuple[SpeculativeBench, list[Any], DetailCollector]


class Reader:
    """Waits for every launched step, in a thread of its own, at some replays of captured graphs and
    at some proposals of the drafter."""

    def __init__(self, bench: SpeculativeBench, random: Random) -> None:
        self._random = random
        self.launch, self.waiting, self.num_reads = bench.worker.launch, list[Any](), 0
        bench.worker.device.before_replay = self._read
        drafter = bench.speculation._drafter
        drafter.propose = partial(self._propose, type(drafter).propose, drafter)

    def _propose(self, propose: Any, drafter: Any, batch: Any) -> Any:
        self._read()
        return propose(drafter, batch)

    def submit(self, step: SchedulerOutput) -> LateResult:
        """In place of the executor's."""
        try:
            pending = self.launch(step)
        except Exception as error:
            return LateResult(None, error)
        self.waiting.append(pending)
        return LateResult(pending)

    def _read(self) -> None:
        """Where the launching thread holds the lock the reader has to wait for it: it gets some
        time to find out."""
        if not self.waiting or self._random.random() < 0.5:
            return
        waiting, self.waiting = self.waiting, []
        thread = threading.Thread(target=lambda: [pending.wait() for pending in waiting])
        thread.start()
        thread.join(0.02)
        self.num_reads += not thread.is_alive()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tensor_library: str) -> World:
    folder = write_model(tmp_path_factory.mktemp("target"), with_tokenizer=True)
    plain = SpeculativeBench(folder, tensor_library)
    requests = make_free_requests(Random(5), 12, plain.vocab_size)
    bench = SpeculativeBench(
        *(folder, tensor_library, "ngram_match", {"min_ngram_size": 1}),
        captures=True,
        processors=(),
    )
    return bench, requests, answers_alone(plain, requests)


def play_with(world: World, seed: int) -> int:
    """A random mix; how often the reader was done before the launch went on."""
    bench, requests, truth = world
    random = Random(seed)
    reader = Reader(bench, random)
    bench._executor.submit = reader.submit  # type: ignore[method-assign]
    settings = replace(Settings.random(random), overlap=True)
    chosen = random.sample(requests, 4)
    _, collector = bench.run_varied(settings, [(0, request) for request in chosen], random)
    check(collector, chosen, truth)
    return reader.num_reads


def test_results_read_in_mid_launch_change_nothing(world: World) -> None:
    num_reads = sum(play_with(world, seed) for seed in range(12))
    for seed in range(12, 60):  # a starved reader is late more often
        if num_reads > 50:
            break
        num_reads += play_with(world, seed)
    assert num_reads > 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_runs_change_nothing(world: World) -> None:
    for seed in range(12, 1012):
        play_with(world, seed)
