"""Speculative steps that go ahead of their results give the tokens that come without speculation.

On a device that records steps: drafts, positions and the number of right drafts stay there, and the
host finds out later. Sequences end, are aborted and preempted meanwhile.
"""

from __future__ import annotations

import queue
import threading
from abc import ABCMeta
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from fd_speculative.ngram import DeviceNgramDrafter

from fastdeploy_core.config import ParallelConfig, SpeculativeConfig
from fastdeploy_core.contracts.device import PostingDevice
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.engine.processes.worker_process import make_worker
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.scheduler import decode_count, planner
from fastdeploy_core.types import SchedulerOutput
from fastdeploy_core.worker import graph_sizes
from fastdeploy_core.worker.draft_batch import DraftBatches
from fastdeploy_core.worker.graphs import CapturedDecode, CapturedPrompt
from fastdeploy_testing.capturing import CapturingDevice, OnCapturingDevice
from tests.cpu.engine_mixes import LateResult, Settings, play
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
PROMPT_SIZES = (8, 32)  # tokens of steps with prompts that are captured


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), with_tokenizer=True)


@pytest.fixture(scope="module")
def world(folder: Path, tensor_library: str) -> tuple[list[Any], DetailCollector]:
    """Requests, and their answers without speculation."""
    plain = SpeculativeBench(folder, tensor_library)
    requests = make_free_requests(Random(5), NUM_REQUESTS, plain.vocab_size)
    return requests, answers_alone(plain, requests)


METHODS = (
    *("ngram_match", "draft_model"),
    pytest.param("draft_model, posting", marks=pytest.mark.slow),
    *("draft_model, posting several", "ngram_match, posting several"),
)
MOST = 3  # decodes of a step that are several


def host_box(device: CapturingDevice, num_words: int) -> tuple[Any, np.ndarray]:
    """PostingDevice.host_box of a processor, whose memory is the host's anyway."""
    host = np.zeros(num_words, dtype=np.int64)
    return device.xp.from_numpy(host), host


@pytest.fixture(scope="module", params=METHODS)
def bench(
    folder: Path, tensor_library: str, request: pytest.FixtureRequest
) -> Iterator[SpeculativeBench]:
    """Drafts by the target's double, every third of them spoilt, or by n-grams on the device.
    Results are copied to the host, or come by themselves; then steps may be of several decodes."""
    method, _, posts = request.param.partition(", ")
    if posts and tensor_library != "torch":
        pytest.skip("PaddlePaddle's tensors on a processor do not share memory with arrays")
    options = {"min_ngram_size": 1} if method == "ngram_match" else {"model": str(folder)}
    with pytest.MonkeyPatch.context() as patch:
        if posts:
            patch.setattr(CapturingDevice, "host_box", host_box, raising=False)
        if posts.endswith("several"):
            made_device = CapturingDevice.__init__

            def several(device: CapturingDevice, options: Any) -> None:
                made_device(device, options)
                device.limits = replace(device.limits, decodes_per_step=MOST)

            patch.setattr(CapturingDevice, "__init__", several)
            patch.setattr(decode_count, "most_at", lambda *step: 1e6)
            patch.setattr(planner, "BEFORE_SEVERAL", 2)
        patch.setattr(graph_sizes, "prompt_ladder", lambda most: PROMPT_SIZES)
        made = SpeculativeBench(
            folder, tensor_library, method, options, captures=True, processors=()
        )
        made.worker.device.before_replay = lambda: lose_what_was_left(made)
        if method != "ngram_match":
            drafter, xp = made.speculation._drafter, made.worker.device.xp
            made.speculation._drafter = SpoilsDevice(drafter, xp, made.vocab_size)
        yield made
        assert (made.worker._runner.slots.postbox is not None) == bool(posts)
    ABCMeta._abc_caches_clear(PostingDevice)  # which remembers that the class was one


def lose_what_was_left(bench: SpeculativeBench) -> None:
    """Captured graphs share memory: what one has left is gone when another step is replayed."""
    graphs = bench.worker._runner._graphs
    for step in [] if graphs is None else graphs._decodes.values():
        if step._forward is bench.worker.device.current:
            for other in graphs._decodes.values():
                for left in (other.sampled, other.last):
                    if left is not None:
                        left[:] = 2**40


def run_mix(bench: SpeculativeBench, world: Any, seed: int, seen: Counter[str]) -> None:
    requests, truth = world
    random = Random(seed)
    settings = replace(Settings.random(random), overlap=True, max_num_seqs=random.choice([2, 5, 8]))
    chosen = random.sample(requests, random.randrange(2, 9))
    varied = random if random.random() < 0.5 else None
    executor = bench._executor
    before = executor.num_ahead, executor.num_steps, executor.num_several
    arrivals = [(random.choice([0, 0, random.randrange(12)]), r) for r in chosen]
    core, collector = bench.run_varied(settings, arrivals, varied)
    check(collector, chosen, truth)
    stats = core.stats()
    assert sum(stats.accepted_drafts_at_total) == stats.accepted_draft_tokens_total
    assert stats.accepted_draft_tokens_total <= stats.draft_tokens_total
    seen["ahead"] += executor.num_ahead - before[0]
    seen["steps"] += executor.num_steps - before[1]
    seen["several"] += executor.num_several - before[2]
    seen["accepted"] += stats.accepted_draft_tokens_total
    seen["refused"] += stats.draft_tokens_total - stats.accepted_draft_tokens_total
    seen["preemptions"] += stats.preemptions_total
    prompts = bench.worker._runner._graphs._prompts
    seen["prompts"] += sum(step._forward.num_replays for step in prompts.values())
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
    takes_several = bench._executor._info.max_decodes > 1
    assert seen["ahead"] > seen["steps"] // (12 if takes_several else 6), seen
    # Prompts that wait end steps of several decodes, and they come at any time in these mixes.
    assert (seen["several"] > num_mixes // 2) == takes_several, seen
    assert seen["accepted"] > 2 * num_mixes and seen["refused"] > 2 * num_mixes
    assert seen["preemptions"] and not seen["failures"]
    assert seen["prompts"] > num_mixes, "steps with prompts are captured, too"


def test_requests_aborted_while_steps_are_ahead_leave_nothing_behind(
    bench: SpeculativeBench, world: Any
) -> None:
    requests, truth = world
    settings = Settings(overlap=True, max_num_seqs=8, num_blocks=64)
    core, collector = bench.engine(settings), DetailCollector()
    chosen = [r for r in requests if len(truth.answers(r.request_id)[0]) > 20][:5]
    assert len(chosen) == 5
    for request in chosen:
        core.add(request)
    gone = {4: chosen[1], 7: chosen[3]}
    for number in range(200):
        if number in gone:
            assert len(core._in_flight) < 2 or core._in_flight[-1][0].drafts.any()
            core.abort([gone[number].request_id])
        if not core.has_work():
            break
        collector.take(core.step())
    core.scheduler.check_idle()
    bench._num_seq_ids = core.scheduler._next_seq_id
    check(collector, [r for r in chosen if r not in gone.values()], truth)


def test_a_row_with_nan_fails_alone_while_steps_are_ahead(
    bench: SpeculativeBench, world: Any
) -> None:
    requests, truth = world
    core, collector = bench.engine(Settings(overlap=True, max_num_seqs=8)), DetailCollector()
    chosen = [r for r in requests if len(truth.answers(r.request_id)[0]) > 20][:4]
    for request in chosen:
        core.add(request)
    for number in range(200):
        if number == 5:
            assert core._in_flight[-1][0].drafts.any()
            broken = core.scheduler.roster.running[1]
            # Of the values: PaddlePaddle's softmax on a processor turns a NaN score into none.
            _, values = bench.worker._runner.caches.tensors[0]
            xp = bench.worker.device.xp
            block = xp.to_device(xp.from_numpy(np.array(broken.table.blocks[:1])), values.device)
            xp.index_copy_(values, 0, block, xp.index_select(values, 0, block) * float("nan"))
        if not core.has_work():
            break
        collector.take(core.step())
    core.scheduler.check_idle()
    bench._num_seq_ids = core.scheduler._next_seq_id
    name = broken.request.request_id
    assert set(collector.errors) == {name}
    told = collector.tokens[name][0]
    assert told == truth.tokens[name][0][: len(told)]
    check(collector, [r for r in chosen if r.request_id != name], truth)


def test_padding_rows_beside_sampled_ones_are_drafted_for_from_numbers_of_their_own(
    bench: SpeculativeBench, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows in a step captured for four, sampled by a sampler that is not captured."""
    if bench._executor._info.max_decodes > 1:
        pytest.skip("where steps may be of several decodes all sampling is captured")
    requests, truth = world
    padded, write_back = [], CapturedDecode.write_back

    def noting(self: CapturedDecode, num_rows: int, drawn: Any, marked: Any) -> Any:
        padded.append(num_rows < self.size and self.width > 1)
        return write_back(self, num_rows, drawn, marked)

    monkeypatch.setattr(CapturedDecode, "write_back", noting)
    monkeypatch.setattr(CapturedDecode, "samples_at_random", False)
    core = play_sampled(bench, requests, truth)
    assert sum(padded) > 2 and not core.stats().draft_failures_total


def play_sampled(bench: SpeculativeBench, requests: list[Any], truth: DetailCollector) -> Any:
    """The three longest answers that are sampled at random."""
    sampled = [r for r in requests if not r.sampling.is_greedy and r.sampling.is_unconstrained]
    sampled.sort(key=lambda r: -len(truth.answers(r.request_id)[0]))
    arrivals = [(0, request) for request in sampled[:3]]
    core, collector = bench.run_varied(Settings(overlap=True, max_num_seqs=8), arrivals, None)
    check(collector, sampled[:3], truth)
    return core


def test_samples_at_random_are_captured_with_drafts(
    bench: SpeculativeBench, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is left to the sampler, and those with drafts accept some of them."""
    requests, truth = world
    widths, replay = Counter[int](), CapturedDecode.replay_random

    def noting(self: CapturedDecode, slots: np.ndarray, *, filters: bool) -> Any:
        widths[self.width] += 1
        return replay(self, slots, filters=filters)

    def refuse(self: CapturedDecode, *others: Any) -> Any:
        raise AssertionError("a sampler drew")

    monkeypatch.setattr(CapturedDecode, "replay_random", noting)
    monkeypatch.setattr(CapturedDecode, "write_back", refuse)
    stats = play_sampled(bench, requests, truth).stats()
    assert max(widths) > 1 and widths[max(widths)] > 5, widths
    assert stats.draft_tokens_total > 10 and not stats.draft_failures_total
    # Nobody's n-grams guess what a random model draws at random; its double, with the same numbers,
    # does.
    assert bench.speculation.reads_history or stats.accepted_draft_tokens_total > 10


def test_histories_on_the_device_are_complete_whenever_they_are_read(
    folder: Path, tensor_library: str, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting stops and begins again, prompts come in between, and nothing is missing."""
    requests, truth = world
    # Of several decodes without drafts that are on their way only the last token is there.
    monkeypatch.setattr(planner, "BEFORE_SEVERAL", 10**6)
    bench = SpeculativeBench(
        folder, tensor_library, "ngram_match", {"min_ngram_size": 1}, captures=True, processors=()
    )
    seen = Counter[str]()
    propose = DeviceNgramDrafter.propose

    def comparing(self: DeviceNgramDrafter, batch: Any) -> Any:
        held, host = batch.history.numpy(), bench.worker._runner.slots
        for slot, known in zip(batch.history_rows.tolist(), batch.num_known.tolist(), strict=True):
            if slot < host.max_num_seqs:
                known = min(known, int(host.num_known[slot]))
                assert held[slot, :known].tolist() == host.token_ids[slot, :known].tolist()
                seen["rows"] += 1
        return propose(self, batch)

    core = bench.engine(Settings(overlap=True, max_num_seqs=4))
    monkeypatch.setattr(DeviceNgramDrafter, "propose", comparing)
    lengths = count()
    core.scheduler._policy.choose = lambda num_rows, kind: 3 * (next(lengths) // 6 % 2)
    collector = play(core, [(6 * n, r) for n, r in enumerate(requests[:10])], DetailCollector())
    check(collector, requests[:10], truth)
    assert seen["rows"] > 60


class TwoRanks:
    """An executor whose second rank runs in a thread."""

    world_size = 2
    sampling = experts = None

    def __init__(self, config: Any, resolved: Any, address: Path) -> None:
        self.workers = [make_worker(config, resolved, rank, 2, str(address)) for rank in range(2)]
        self.num_ahead = 0
        self._calls: queue.Queue[Any] = queue.Queue()
        self._answers: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while (call := self._calls.get()) is not None:
            self._answers.put(call(self.workers[1]))

    def _together(self, call: Any) -> Any:
        self._calls.put(call)
        own = call(self.workers[0])
        self._answers.get(timeout=60)
        return own

    def load(self) -> list[Any]:
        return [self._together(lambda worker: worker.load())]

    def initialize_cache(
        self, num_blocks: int, num_host_blocks: int, *, host_files: Sequence[str] = ()
    ) -> None:
        self._together(lambda worker: worker.initialize_cache(num_blocks, num_host_blocks))

    def submit(self, step: SchedulerOutput) -> LateResult:
        self.num_ahead += step.rows is not None and bool(step.rows.num_drafts.any())
        return LateResult(self._together(lambda worker: worker.launch(step)))

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(60)
        for worker in self.workers:
            worker.close()


def test_two_ranks_go_ahead_together(folder: Path, tensor_library: str, tmp_path: Path) -> None:
    plain = SpeculativeBench(folder, tensor_library, sharp=False)
    requests = make_free_requests(Random(8), 6, plain.vocab_size)
    truth = answers_alone(plain, requests)
    config = replace(
        plain.config,
        parallel=ParallelConfig(tensor_parallel_size=2),
        logits_processors=(),
        speculative=SpeculativeConfig(
            "draft_model", 3, adaptive_length=False, options={"model": str(folder)}
        ),
    )
    config = Settings(overlap=True, max_num_seqs=8).apply(config, plain.block_bytes)
    address = tmp_path / "ranks"
    address.mkdir(mode=0o700)
    resolved: Any = OnCapturingDevice(resolve_plugins(config))
    ranks = TwoRanks(config, resolved, address)
    try:
        core = EngineCore(config, resolved, ranks)  # type: ignore[arg-type]
        check(play(core, [(0, r) for r in requests], DetailCollector()), requests, truth)
        stats = core.stats()
        assert stats.accepted_draft_tokens_total > 20 and ranks.num_ahead > 5
    finally:
        ranks.close()


def test_captured_prompts_fill_a_drafters_cache_as_others_do(
    folder: Path, tensor_library: str, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not written there, or wrongly, would show in drafts that the target refuses."""
    requests, _ = world
    found, replays, make = [], [], DraftBatches.make_captured

    def noting(self: DraftBatches, captured: Any, *more: Any) -> Any:
        if isinstance(captured, CapturedPrompt):
            replays.append(captured._forward.num_replays)
        return make(self, captured, *more)

    monkeypatch.setattr(DraftBatches, "make_captured", noting)
    for sizes in ((), PROMPT_SIZES):
        monkeypatch.setattr(graph_sizes, "prompt_ladder", lambda most, sizes=sizes: sizes)
        options = {"model": str(folder)}
        bench = SpeculativeBench(
            folder, tensor_library, "draft_model", options, captures=True, processors=()
        )
        settings = Settings(overlap=True, max_num_seqs=8)
        arrivals = [(4 * n, request) for n, request in enumerate(requests[:8])]
        core, _ = bench.run_varied(settings, arrivals, None)
        stats = core.stats()
        found.append((stats.draft_tokens_total, stats.accepted_draft_tokens_total))
    prompts = bench.worker._runner._graphs._prompts
    assert sum(step._fill.num_replays for step in prompts.values()) > 2
    assert found[0] == found[1] and found[0][1] > 20
    assert min(replays) > 0, "a device that only records has computed nothing for the drafter yet"
