"""On a device whose steps are not queued ahead several decodes are one step while nothing is
drafted, and drafts may begin after any of them: no token changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fastdeploy_core.scheduler import decode_count
from fastdeploy_testing.capturing import CapturingDevice
from tests.cpu.engine_mixes import Settings, counted, play
from tests.cpu.speculative_mixes import (
    NUM_DRAFTS,
    DetailCollector,
    SpeculativeBench,
    SpoilsDevice,
    answers_alone,
    check,
    make_free_requests,
)
from tests.worker_steps import write_model

MOST = 4
NUM_MIXES = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), with_tokenizer=True)


@pytest.fixture(scope="module")
def world(folder: Path, tensor_library: str) -> tuple[list[Any], DetailCollector]:
    """Requests, and their answers without speculation."""
    plain = SpeculativeBench(folder, tensor_library)
    requests = make_free_requests(Random(11), 20, plain.vocab_size)
    return requests, answers_alone(plain, requests)


@pytest.fixture(scope="module", params=["ngram_match", "suffix", "draft_model"])
def bench(
    folder: Path, tensor_library: str, request: pytest.FixtureRequest
) -> Iterator[SpeculativeBench]:
    """Drafts by n-grams on the device, by a host drafter, and by the target's double, every third
    of these spoilt."""
    options: dict[str, dict[str, Any]] = {
        "ngram_match": {"min_ngram_size": 1},
        "draft_model": {"model": str(folder)},
    }
    method, made_device = request.param, CapturingDevice.__init__

    def several(device: CapturingDevice, options: Any) -> None:
        made_device(device, options)
        device.limits = replace(device.limits, decodes_per_step=MOST, overlap=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturingDevice, "__init__", several)
        patch.setattr(decode_count, "most_at", lambda *step: 1e6)
        made = SpeculativeBench(
            *(folder, tensor_library, method, options.get(method)), captures=True, processors=()
        )
        if method == "draft_model":
            drafter, xp = made.speculation._drafter, made.worker.device.xp
            made.speculation._drafter = SpoilsDevice(drafter, xp, made.vocab_size)
        yield made


def test_several_decodes_are_one_step_while_nothing_is_drafted(
    bench: SpeculativeBench, world: tuple[list[Any], DetailCollector]
) -> None:
    requests, truth = world
    seen = Counter[str]()
    for seed in range(NUM_MIXES):
        random = Random(seed)
        settings = replace(Settings.random(random), overlap=False)
        chosen = random.sample(requests, random.randrange(2, 7))
        core = bench.engine(settings)
        lengths = drawn_lengths(random)
        core.scheduler._policy.choose = lambda num_rows, kind, lengths=lengths: next(lengths)
        arrivals = [(random.randrange(10), request) for request in chosen]
        with counted(bench) as found:
            collector = play(core, arrivals, DetailCollector())
        core.scheduler.check_idle()
        bench._num_seq_ids = core.scheduler._next_seq_id
        check(collector, chosen, truth)
        stats = core.stats()
        seen["several"] += sum(number > 1 for number in found)
        seen["drafts"] += stats.draft_tokens_total
        seen["right"] += stats.accepted_draft_tokens_total
        assert not stats.draft_failures_total
    assert seen["several"] > 2 * NUM_MIXES and seen["drafts"] > 5 * NUM_MIXES, seen
    assert seen["right"], seen


def drawn_lengths(random: Random) -> Iterator[int]:
    """Some steps with drafts, some without, and so on."""
    while True:
        for number in (random.choice([1, NUM_DRAFTS]), 0):
            for _ in range(random.randrange(2, 8)):
                yield number
