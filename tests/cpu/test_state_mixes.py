"""Models with states through the engine: the same tokens whatever it does, and no state more than
there are sequences to keep it for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fastdeploy_core.config import GraphConfig
from fastdeploy_core.engine import core as engine_core
from tests.checkpoints import build
from tests.cpu.engine_mixes import (
    BLOCK_SIZE,
    Bench,
    Settings,
    answers_alone,
    check,
    check_captured,
    check_poisoned_step,
    count_loads,
    make_requests,
    poison,
)
from tests.cpu.speculative_mixes import Oracle, SpeculativeBench, make_free_requests, whole_texts
from tests.cpu.speculative_mixes import answers_alone as alone_without_drafts
from tests.cpu.speculative_mixes import check as check_speculated
from tests.null_engine import make_request

# Beside attention: delta nets, Mamba-2, convolutions, and delta nets that fade channel by channel,
# which differ from the first in the driver alone.
VARIANTS = ("qwen3-next", "granite4", "lfm2", "kimi-linear")
MARKED = [pytest.param(v, marks=[pytest.mark.slow] * (v == "kimi-linear")) for v in VARIANTS]
NUM_MIXES = (8, pytest.param(70, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("states"), list(VARIANTS))


@pytest.fixture(scope="module", params=MARKED)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bench(variant: str, checkpoints: Path, tensor_library: str) -> Bench:
    return Bench(checkpoints / variant, tensor_library)


@pytest.mark.parametrize("num_mixes", NUM_MIXES)
def test_random_mixes_give_the_tokens_of_each_request_alone(
    bench: Bench, num_mixes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(Random(5), 24)
    alone = answers_alone(bench, requests)
    plan_cache, seen = engine_core.plan_cache, Counter[str]()

    def short(*args: Any) -> Any:
        """States for what one sequence can hold, or for one more."""
        made = plan_cache(*args)
        plans = tuple(g._replace(num_blocks=g.most_blocks + seed % 2) for g in made.bounded)
        return made._replace(bounded=plans) if seed % 3 == 0 else made

    monkeypatch.setattr(engine_core, "plan_cache", short)
    initialize = bench._executor.initialize_cache

    def poisoned(*sizes: int, **named: Any) -> None:
        initialize(*sizes, **named)
        poison(bench)

    monkeypatch.setattr(bench._executor, "initialize_cache", poisoned)
    loads = count_loads(bench, monkeypatch)
    for seed in range(num_mixes):
        random = Random(seed)
        settings = replace(Settings.random(random), prefix_caching=random.random() < 0.8)
        chosen = random.sample(requests, random.randrange(4, 9))
        core, collector = bench.run(settings, [(random.randrange(10), r) for r in chosen])
        check(collector, chosen, alone)
        core.scheduler.kv.check()
        assert core.scheduler.kv.num_used == 0
        stats = core.stats()
        seen["preemptions"] += stats.preemptions_total
        seen["prefix hits"] += stats.prefix_hit_tokens_total
        seen["shared steps"] += stats.step_sequences_total > stats.steps_total
        seen["overlap"] += core.info.overlap
        seen["forks"] += sum(r.sampling.n > 1 for r in chosen)
    assert loads[0]
    assert seen["preemptions"] and seen["prefix hits"] > num_mixes
    assert seen["shared steps"] > num_mixes // 2 and seen["forks"] > num_mixes // 2
    assert num_mixes // 4 <= seen["overlap"] < num_mixes


@pytest.mark.parametrize("num_mixes", NUM_MIXES)
def test_captured_steps_give_the_same_tokens(
    bench: Bench, checkpoints: Path, variant: str, tensor_library: str, num_mixes: int
) -> None:
    """Decodes replayed over blocks that hold NaN where nobody wrote."""
    requests = make_requests(Random(6), 14)
    alone = answers_alone(bench, requests)
    captured = Bench(checkpoints / variant, tensor_library, GraphConfig(sizes=(1, 2, 4, 8)))
    seen = check_captured(captured, requests, alone, num_mixes)
    captured.worker.close()
    assert seen["replays"] > seen["steps"] / 4 and seen["preemptions"]


@pytest.mark.parametrize("num_mixes", (3, NUM_MIXES[1]))
@pytest.mark.parametrize("captures", [False, True])
def test_refused_drafts_leave_states_as_they_were(
    checkpoints: Path, variant: str, tensor_library: str, captures: bool, num_mixes: int
) -> None:
    """Random mixes with drafts, 0 to 4 changing from step to step, some right and some wrong."""
    folder = checkpoints / variant
    plain = SpeculativeBench(folder, tensor_library, processors=())
    requests = make_free_requests(Random(5), 16, plain.vocab_size)
    truth = alone_without_drafts(plain, requests)
    bench = SpeculativeBench(folder, tensor_library, "suffix", captures=captures, processors=())
    texts = whole_texts(requests, truth)
    bench.speculation._drafter = Oracle(Random(1), texts, bench.vocab_size)
    initialize, seen = bench._executor.initialize_cache, Counter[str]()

    def poisoned(*sizes: int, **named: Any) -> None:
        initialize(*sizes, **named)
        poison(bench)

    bench._executor.initialize_cache = poisoned  # type: ignore[method-assign]
    for seed in range(num_mixes):
        random = Random(seed)
        chosen = random.sample(requests, random.randrange(4, 9))
        arrivals = [(random.randrange(10), r) for r in chosen]
        core, collector = bench.run_varied(Settings.random(random), arrivals, random)
        check_speculated(collector, chosen, truth)
        core.scheduler.kv.check()
        stats = core.stats()
        seen["refused"] += stats.draft_tokens_total - stats.accepted_draft_tokens_total
        seen["accepted"] += stats.accepted_draft_tokens_total
        seen["prefix hits"] += stats.prefix_hit_tokens_total
        seen["replays"] += bench.num_replays if captures else 0
        assert not stats.draft_failures_total
    assert seen["refused"] > 10 * num_mixes and seen["accepted"] > 10 * num_mixes
    assert seen["prefix hits"] and bool(seen["replays"]) == captures


@pytest.mark.parametrize("overlap", [False, True])
def test_request_that_breaks_a_step_fails_alone(
    bench: Bench, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(Random(9), 6)
    check_poisoned_step(bench, requests, answers_alone(bench, requests), overlap, monkeypatch)


def test_a_sequence_holds_one_state_and_that_of_its_prompts_end(bench: Bench) -> None:
    settings = Settings(
        max_num_seqs=2, chunked_prefill=True, prefix_caching=True, max_num_batched_tokens=8
    )
    core = bench.engine(settings)
    core.add(make_request("long", [5 + i % 90 for i in range(30)], max_tokens=20, ignore_eos=True))
    group, held = core.scheduler.kv.bounded[0], []
    while core.has_work():
        core.step()
        held.append(group.pool.num_used)
    assert max(held) == 2 and held[-2] == 1
    assert core.scheduler.kv.num_used == 0 and group.pool.num_cached == 1
    bench._num_seq_ids = core.scheduler._next_seq_id


def test_prompts_that_differ_late_resume_where_they_part(bench: Bench) -> None:
    """The second one leaves a state where it left the first; from then on it is found."""
    settings = Settings(
        max_num_seqs=1, chunked_prefill=True, prefix_caching=True, max_num_batched_tokens=16
    )
    core, hits = bench.engine(settings), []
    for number in range(4):
        prompt = [5 + i for i in range(22)] + [40 + number] * 9
        core.add(make_request(f"r{number}", prompt, max_tokens=2, ignore_eos=True))
        before = core.stats().prefix_hit_tokens_total
        while core.has_work():
            core.step()
        hits.append(core.stats().prefix_hit_tokens_total - before)
    assert hits == [0, 0, 20, 20] and 20 % BLOCK_SIZE == 0
    bench._num_seq_ids = core.scheduler._next_seq_id


def test_the_report_says_what_the_worker_allocated(bench: Bench) -> None:
    core, _ = bench.run(Settings(max_num_seqs=3), [])
    kv, caches = core.scheduler.kv, bench.worker._runner.caches
    (group,), xp = kv.bounded, bench.worker.device.xp
    allocated = sum(xp.nbytes(tensor) for layer in caches.tensors for tensor in layer)
    info, (per_block, per_state) = core.info, caches.block_bytes()
    assert allocated == kv.pool.num_blocks * per_block + group.pool.num_blocks * per_state
    assert allocated == info.num_blocks * info.bytes_per_block + info.bounded_bytes
    line = f"{group.pool.num_blocks} blocks for layers with a state ({per_state} bytes each)"
    assert any(line in text for text in info.report)
