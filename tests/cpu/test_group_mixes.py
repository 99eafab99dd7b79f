"""Models with windows, through the engine: the same tokens whatever it does, and no more memory
than the windows need."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fastdeploy_core.config import GraphConfig
from fastdeploy_core.engine import core as engine_core
from fastdeploy_core.engine.client import LocalEngine
from fastdeploy_core.engine.processes.worker_process import make_worker
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.models.qwen import Qwen2ForCausalLM
from tests.checkpoints import build
from tests.cpu.engine_mixes import (
    BLOCK_SIZE,
    Bench,
    Settings,
    answers_alone,
    check,
    check_captured,
    check_poisoned_step,
    make_engine_config,
    make_requests,
    play,
)
from tests.cpu.speculative_mixes import Oracle, SpeculativeBench, whole_texts
from tests.cpu.speculative_mixes import answers_alone as alone_without_drafts
from tests.cpu.speculative_mixes import check as check_speculated
from tests.cpu.speculative_mixes import make_requests as make_speculated
from tests.null_engine import make_request
from tests.worker_steps import write_model

# Windows alone; windows after a full layer; windows and full layers in turn, with sinks, or with
# capped logits; chunks, and full layers without positions.
VARIANTS = ("mistral-window", "qwen2-window", "gpt-oss", "gemma2", "llama4")
NUM_MIXES = (15, pytest.param(110, marks=[pytest.mark.slow, pytest.mark.timeout(900)]))  # per model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoints"), list(VARIANTS))


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bench(variant: str, checkpoints: Path, tensor_library: str) -> Bench:
    return Bench(checkpoints / variant, tensor_library)


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


@pytest.fixture
def short_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded groups get what one sequence can hold, instead of what all can."""
    plan_cache = engine_core.plan_cache

    def plan(*args: Any) -> Any:
        made = plan_cache(*args)
        short = tuple(group._replace(num_blocks=group.most_blocks) for group in made.bounded)
        return made._replace(bounded=short)

    monkeypatch.setattr(engine_core, "plan_cache", plan)


@pytest.mark.parametrize("num_mixes", NUM_MIXES)
@pytest.mark.parametrize("room", ["enough", "short"])
def test_random_mixes_give_the_tokens_of_each_request_alone(
    bench: Bench,
    num_mixes: int,
    room: str,
    request: pytest.FixtureRequest,
) -> None:
    requests = make_requests(Random(5), 40)
    alone = answers_alone(bench, requests)
    if room == "short":
        request.getfixturevalue("short_groups")
    seen = Counter[str]()
    for seed in range(num_mixes):
        random = Random(seed)
        settings = Settings.random(random)
        chosen = random.sample(requests, random.randrange(4, 9))
        core, collector = bench.run(settings, [(random.randrange(10), r) for r in chosen])
        check(collector, chosen, alone)
        stats = core.stats()
        seen["preemptions"] += stats.preemptions_total
        seen["prefix hits"] += stats.prefix_hit_tokens_total
        seen["shared steps"] += stats.step_sequences_total > stats.steps_total
        seen["overlap"] += core.info.overlap
        seen["forks"] += sum(r.sampling.n > 1 for r in chosen)
    assert seen["preemptions"] > num_mixes // 2 and seen["prefix hits"] > 2 * num_mixes
    assert seen["shared steps"] > num_mixes // 2 and seen["forks"] > num_mixes // 2
    assert num_mixes // 4 < seen["overlap"] < num_mixes


@pytest.mark.parametrize("num_mixes", NUM_MIXES)
def test_three_groups_give_the_tokens_of_each_request_alone(
    checkpoints: Path, tensor_library: str, num_mixes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full layer, one with a window and one with chunks, which no family here has together; the
    prompts are longer than both. Alone means: in one step, and without a cache."""

    def layer(read: Any, number: int, spec: Any, rotary: Any) -> tuple[Any, Any]:
        return replace(spec, window=7 * (number == 1), chunk=8 * (number == 2)), rotary

    monkeypatch.setattr(Qwen2ForCausalLM, "layer", staticmethod(layer))
    bench = Bench(checkpoints / "qwen2-window", tensor_library)
    requests = make_requests(Random(11), 24)
    alone = answers_alone(bench, requests)
    hits = 0
    for seed in range(num_mixes):
        random = Random(100 + seed)
        chosen = random.sample(requests, random.randrange(4, 9))
        arrivals = [(random.randrange(10), r) for r in chosen]
        core, collector = bench.run(Settings.random(random), arrivals)
        check(collector, chosen, alone)
        hits += core.stats().prefix_hit_tokens_total
    assert len(core.scheduler.kv.bounded) == 2 and hits > num_mixes


@pytest.mark.parametrize("overlap", [False, True])
def test_request_that_breaks_a_step_fails_alone(
    bench: Bench, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(Random(9), 6)
    check_poisoned_step(bench, requests, answers_alone(bench, requests), overlap, monkeypatch)


def test_a_long_sequence_holds_its_window_and_the_step(bench: Bench) -> None:
    """At every step: the blocks of the window, of what the step feeds, and one begun block."""
    settings = Settings(max_num_seqs=2, chunked_prefill=True, max_num_batched_tokens=8)
    core = bench.engine(settings)
    prompt = [5 + i % 90 for i in range(40)]
    core.add(make_request("long", prompt, max_tokens=12, ignore_eos=True))
    group, most = core.scheduler.kv.bounded[0], 0
    while core.has_work():
        core.step()
        most = max(most, group.pool.num_used)
    window, step = group.rule.tokens, 8
    assert most <= -(-(window - 1) // BLOCK_SIZE) + 1 + -(-step // BLOCK_SIZE)
    assert core.scheduler.kv.num_used == 0
    bench._num_seq_ids = core.scheduler._next_seq_id


def test_the_report_says_what_the_worker_allocated(bench: Bench) -> None:
    core, _ = bench.run(Settings(), [])
    kv, caches = core.scheduler.kv, bench.worker._runner.caches
    sizes = [kv.pool.num_blocks, *(group.pool.num_blocks for group in kv.bounded)]
    xp = bench.worker.device.xp
    allocated = sum(xp.nbytes(tensor) for layer in caches.tensors for tensor in layer)
    assert allocated == sum(n * b for n, b in zip(sizes, caches.block_bytes(), strict=True))
    info = core.info
    assert allocated == info.num_blocks * info.bytes_per_block + info.bounded_bytes
    text = "\n".join(info.report)
    for group, num_bytes in zip(kv.bounded, caches.block_bytes()[1:], strict=True):
        assert f"{group.pool.num_blocks} blocks of {BLOCK_SIZE} tokens for layers with a" in text
        rule = f"{group.rule.kind} of {group.rule.tokens} tokens"
        assert f"{rule} ({num_bytes} bytes each)" in text


def test_a_context_within_the_window_is_one_group(checkpoints: Path, tensor_library: str) -> None:
    config, _ = make_engine_config(checkpoints / "mistral-window", tensor_library)
    config = replace(config, model=replace(config.model, max_model_len=12))
    worker = make_worker(config, resolve_plugins(config), 0, 1, "")
    info = worker.load()
    worker.close()
    assert not info.bounded and info.bytes_per_block
    assert any("captured decode steps: none, the device" in line for line in info.report)


def test_two_ranks_give_the_tokens_of_one(checkpoints: Path, tensor_library: str) -> None:
    bench = Bench(checkpoints / "qwen2-window", tensor_library)
    requests = make_requests(Random(7), 8)
    alone = answers_alone(bench, requests)
    config, resolved = make_engine_config(checkpoints / "qwen2-window", tensor_library, num_ranks=2)
    settings = Settings(
        prefix_caching=True,
        chunked_prefill=True,
        max_num_batched_tokens=17,
        max_num_seqs=5,
        num_blocks=18,
        host_blocks=40,
        overlap=True,
    )
    engine = LocalEngine(settings.apply(config, bench.block_bytes), resolved)
    try:
        for seed in range(4):
            random = Random(seed)
            chosen = random.sample(requests, random.randrange(3, 7))
            collector = play(engine, [(random.randrange(8), r) for r in chosen])
            check(collector, chosen, alone)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory, tensor_library: str) -> Any:
    """A model with windows of 9 tokens, a model of the same size without, requests, and their
    answers without speculation."""
    folder = windowed(tmp_path_factory.mktemp("target"))
    plain = SpeculativeBench(folder, tensor_library)
    requests = make_speculated(Random(5), 16, folder, plain.vocab_size)
    draft = write_model(tmp_path_factory.mktemp("draft"), with_tokenizer=True)
    return folder, draft, requests, alone_without_drafts(plain, requests)


def windowed(folder: Path) -> Path:
    """write_model's, as a Mistral."""
    path = write_model(folder, with_tokenizer=True) / "config.json"
    config = json.loads(path.read_text("utf-8"))
    own = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9}
    path.write_text(json.dumps(config | own), encoding="utf-8")
    return folder


@pytest.mark.parametrize("num_mixes", (6, pytest.param(60, marks=NUM_MIXES[1].marks)))
@pytest.mark.parametrize("method", ["oracle", "draft_model"])
def test_refused_drafts_leave_windows_as_they_were(
    speculating: Any, tensor_library: str, method: str, num_mixes: int
) -> None:
    folder, draft, requests, truth = speculating
    options = {"model": str(draft)} if method == "draft_model" else {}
    name = "suffix" if method == "oracle" else method
    bench = SpeculativeBench(folder, tensor_library, name, options)
    if method == "oracle":
        texts = whole_texts(requests, truth)
        bench.speculation._drafter = Oracle(Random(1), texts, bench.vocab_size)
    seen: Counter[str] = Counter()
    for seed in range(num_mixes):
        random = Random(seed)
        chosen = random.sample(requests, random.randrange(4, 9))
        arrivals = [(random.randrange(10), r) for r in chosen]
        core, collector = bench.run_varied(Settings.random(random), arrivals, random)
        check_speculated(collector, chosen, truth)
        stats = core.stats()
        seen["refused"] += stats.draft_tokens_total - stats.accepted_draft_tokens_total
        seen["accepted"] += stats.accepted_draft_tokens_total
        assert not stats.draft_failures_total
    assert seen["refused"] > 10 * num_mixes
    assert method == "draft_model" or seen["accepted"] > 10 * num_mixes


def test_a_drafter_with_windows_is_refused(speculating: Any, tensor_library: str) -> None:
    folder, draft, _, _ = speculating
    with pytest.raises(ConfigError, match=r"drafter has layers with a window of 9 .*possible:"):
        SpeculativeBench(draft, tensor_library, "draft_model", {"model": str(folder)})
