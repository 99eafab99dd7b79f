"""Captured decode steps: what a replay gives is what running the step operation by operation
gives."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.config import GraphConfig, SpeculativeConfig
from fastdeploy_core.types import SamplingParams, SchedulerOutput
from fastdeploy_core.worker.worker import Worker
from fastdeploy_testing.capturing import CapturingDevice, OnCapturingDevice
from tests.cpu.test_model_runner import Life, clear, poisoned
from tests.worker_steps import VOCAB, Steps, engine_config, make_worker, sharpen, write_model

GREEDY = SamplingParams(temperature=0)
NAMES = ("LogitBiasLogitsProcessor",)
OFF = GraphConfig(enabled=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def load(config: Any, graphs: GraphConfig | None = None, **place: Any) -> Worker:
    worker = make_worker(dataclasses.replace(config, graphs=graphs or GraphConfig()), **place)
    worker.resolved = OnCapturingDevice(worker.resolved)  # type: ignore[assignment]
    worker.load()
    sharpen(worker)
    return worker


def make_steps(
    folder: Path, library: str, graphs: GraphConfig | None = None, **settings: Any
) -> Steps:
    settings = {"max_num_seqs": 6, "logits_processors": NAMES} | settings
    worker = load(engine_config(folder, library, **settings), graphs)
    return Steps(worker, num_blocks=256, num_host_blocks=64)


@pytest.fixture(scope="module")
def eager(folder: Path, tensor_library: str) -> Iterator[Steps]:
    made = make_steps(folder, tensor_library, OFF)
    yield made
    assert not device_of(made).recorded
    made.worker.close()


@pytest.fixture(scope="module")
def steps(folder: Path, tensor_library: str) -> Iterator[Steps]:
    made = make_steps(folder, tensor_library)
    yield made
    assert not made.tokens, "every test gives its sequences back"
    made.worker.close()


def device_of(steps: Steps) -> CapturingDevice:
    device = steps.worker.device
    assert isinstance(device, CapturingDevice)
    return device


def num_replays(steps: Steps) -> int:
    return sum(work.num_replays for work in device_of(steps).recorded)


@contextmanager
def spoiled_buffers(steps: Steps) -> Iterator[None]:
    """Inside, every buffer that a captured step fills holds garbage when the step begins."""
    device, graphs = device_of(steps), steps.worker._runner._graphs
    constant = ("_offsets_dev", "results")  # results: read between the two halves of a step

    def spoil() -> None:
        if device.current in first_halves:
            for buffers in itertools.chain(*graphs.buffers.values()):
                for name, value in vars(buffers).items():
                    if isinstance(value, device.xp.tensor_type) and name not in constant:
                        value.fill_(-77)

    first_halves = {step._forward for step in graphs._decodes.values()}
    device.before_replay = spoil
    yield
    device.before_replay = None


# -- equality -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_any_mix_gives_the_tokens_that_steps_without_captured_graphs_give(
    steps: Steps, eager: Steps, seed: int
) -> None:
    """Requests come and go, slots are used again, sequences are preempted and swapped, steps are
    launched ahead; every kind of sampling."""
    before = num_replays(steps)
    life = Life(steps, np.random.default_rng(seed), num_sequences=12)
    with spoiled_buffers(steps):
        results = life.run()
    for number, prompt, params, draw_seed in life.all:
        alone = eager.alone(prompt, life.wanted[number], params, draw_seed)
        assert results[number] == alone, (number, params)
    assert num_replays(steps) > before + 5
    clear(steps)
    clear(eager)


def decode(steps: Steps, ids: list[int], count: int) -> None:
    for _ in range(count):
        rows = steps.step([steps.row(n) for n in ids])
        assert all(row.error is None for row in rows)


@pytest.mark.parametrize("sizes", [(1,), (2, 4), (1, 2, 3, 4, 5, 6)], ids=str)
def test_every_batch_size_finds_its_way(
    folder: Path, tensor_library: str, eager: Steps, sizes: tuple[int, ...]
) -> None:
    """Padded, exact, and larger than every captured graph, in turns over the same sequences."""
    steps = make_steps(folder, tensor_library, GraphConfig(sizes=sizes))
    prompts = {n: [3 + n, 40 + n, 7] for n in range(6)}
    truth = {n: eager.alone(p, 14, GREEDY, 0) for n, p in prompts.items()}
    for number, prompt in prompts.items():
        steps.add(number, prompt, GREEDY)
        decode(steps, [number], 1)
    for count in (1, 2, 3, 6, 5, 4, 2, 1):
        decode(steps, list(range(count)), 1)
    for number, prompt in prompts.items():
        tokens = steps.finish(number)[len(prompt) :]
        assert tokens == truth[number][: len(tokens)]
    clear(steps)
    clear(eager)
    captured = {(s.size, s._forward.num_replays > 0) for s in _captured_graphs(steps)}
    assert captured == {(size, True) for size in sizes}
    steps.worker.close()


def _captured_graphs(steps: Steps) -> list[Any]:
    return list(steps.worker._runner._graphs._decodes.values())


def test_missing_rows_write_nothing(steps: Steps) -> None:
    """Five rows run as six or more: nobody's row must not touch any block, the first included."""
    runner = steps.worker._runner
    device, xp = device_of(steps), runner._xp
    ids = list(range(5))
    for number in ids:
        steps.add(number, [5 + number, 6, 7], GREEDY)
    decode(steps, ids, 1)
    decode(steps, ids[:3], 1)  # a smaller batch runs padded
    starts = {number: steps.computed[number] for number in ids}
    rows = [steps.row(number) for number in ids[:3]]
    # Where each row's token belongs; blocks have 4 tokens. What stands there is made to differ.
    written = {(steps.blocks[n][starts[n] // 4], starts[n] % 4) for n in ids[:3]}
    with xp.no_grad():
        for cache in runner.caches.tensors:
            for part in cache:
                for block, offset in written:
                    part[block : block + 1, offset : offset + 1] = 7.0
    before = [np.array(device.to_host(part)) for cache in runner.caches.tensors for part in cache]
    steps.step(rows)
    after = [np.array(device.to_host(part)) for cache in runner.caches.tensors for part in cache]
    for left, right in zip(before, after, strict=True):
        changed = np.argwhere((left != right).any(axis=(2, 3)))
        assert {tuple(entry) for entry in changed.tolist()} == written
    spare = runner.slots.state
    assert device.to_host(spare.num_computed)[-1] == 0
    assert xp.size(spare.tables[-1:]) and not device.to_host(spare.tables)[-1].any()
    for number in ids:
        steps.finish(number)
    clear(steps)


@pytest.mark.parametrize(
    "kinds",
    [[{}], [{"temperature": 0.8}, {}], [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0}]],
    ids=["greedy", "some at random", "some filtered"],
)
def test_a_steady_decode_tells_the_device_nothing(
    steps: Steps, kinds: list[dict[str, Any]]
) -> None:
    device = device_of(steps)
    for number in range(4):
        params = SamplingParams(**({"temperature": 0} | kinds[number % len(kinds)]))
        steps.add(number, [5 + number, 6, 7, 8, 9], params)
    decode(steps, list(range(4)), 2)
    pending = [steps.launch([steps.row(n) for n in range(4)])]
    device.num_uploads = device.num_downloads = device.num_copies = 0
    before = num_replays(steps)
    pending.append(steps.launch([steps.row(n) for n in range(4)]))  # position 7 opens no block
    assert num_replays(steps) == before + 2, "up to hidden states, and from there to slots"
    assert device.num_uploads == device.num_copies == 0
    assert device.num_downloads == 1
    for each in pending:
        steps.take(each.wait())
    assert device.num_copies == 0
    for number in range(4):
        steps.finish(number)
    clear(steps)


def test_a_row_with_nan_fails_alone_and_others_go_on(steps: Steps, eager: Steps) -> None:
    truth = eager.alone([5, 6, 7], 6, GREEDY, 0)
    clear(eager)
    with poisoned(steps, 99):
        steps.add(1, [5, 6, 7], GREEDY)
        steps.add(2, [8, 12, 4], SamplingParams(temperature=0, allowed_token_ids=[99]))
        steps.step([steps.row(1), steps.row(2)])  # draws 99, whose embedding is NaN
        assert steps.tokens[2][-1] == 99
        before = num_replays(steps)
        first = steps.launch([steps.row(1), steps.row(2)])
        second = steps.launch([steps.row(1), steps.row(2)])
        for pending in (first, second):
            good, bad = steps.take(pending.wait())
            assert bad.error == "nan_logits" and not bad.token_ids
            assert good.error is None and len(good.token_ids) == 1
        assert num_replays(steps) > before
        steps.finish(2)
        decode(steps, [1], 3)
        assert steps.finish(1)[3:] == truth
    clear(steps)


def test_logprobs_are_those_of_steps_without_captured_graphs(steps: Steps, eager: Steps) -> None:
    params = SamplingParams(temperature=0.9, logprobs=3)
    found: list[list[Any]] = []
    for each in (steps, eager):
        each.add(1, [5, 6, 7], params, seed=9)
        each.add(2, [50, 60], GREEDY)
        found.append([])
        for _ in range(6):
            first, second = each.step([each.row(1), each.row(2)])
            assert second.logprobs is None
            found[-1] += first.logprobs or []
        each.finish(1)
        each.finish(2)
        clear(each)
    assert len(found[0]) == 6
    for left, right in zip(*found, strict=True):
        assert left.token_ids == right.token_ids and left.rank == right.rank
        assert np.allclose(left.logprobs, right.logprobs, atol=1e-4)


def test_a_step_that_fails_leaves_no_wrong_idea_of_the_device(
    steps: Steps, eager: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The captured graph breaks after the update of the slots: nothing of it counts as told."""
    truth = eager.alone([5, 6, 7], 9, GREEDY, 0)
    clear(eager)
    steps.add(1, [5, 6, 7], GREEDY)
    decode(steps, [1], 4)
    captured = next(step for step in _captured_graphs(steps) if step.size == 1)
    row = steps.row(1)
    with monkeypatch.context() as patch:
        patch.setattr(captured, "_forward", None)
        with pytest.raises(AssertionError):
            steps.launch([row])
    steps.computed[1] -= 1
    taken = row.new_block_ids  # the worker has them; the planner would send the sequence anew
    steps.free += taken
    steps.blocks[1] = steps.blocks[1][: len(steps.blocks[1]) - len(taken)]
    steps.preempt(1, 3, GREEDY)
    decode(steps, [1], 5)
    assert steps.finish(1)[3:] == truth
    clear(steps)


# -- several tokens per row -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(folder: Path, tensor_library: str) -> Iterator[Steps]:
    speculative = SpeculativeConfig(method="ngram_match", num_speculative_tokens=3)
    made = make_steps(folder, tensor_library, speculative=speculative)
    yield made
    made.worker.close()


@pytest.mark.parametrize("seed", range(4))
def test_drafts_in_a_captured_step_never_change_tokens(
    wide: Steps, eager: Steps, seed: int
) -> None:
    """Rows with more, fewer and no drafts share a step; any of them may be wrong."""
    rng = np.random.default_rng(seed)
    kinds = [GREEDY, SamplingParams(temperature=0.8, top_p=0.95), GREEDY]
    prompts = {n: rng.integers(3, VOCAB, 3 + n).tolist() for n in range(3)}
    truth = {n: eager.alone(prompts[n], 30, kinds[n], 70 + n) for n in prompts}
    clear(eager)
    for number, prompt in prompts.items():
        wide.add(number, prompt, kinds[number], seed=70 + number)
    wide.step([wide.row(n) for n in prompts])
    before, accepted = num_replays(wide), 0
    while min(len(wide.tokens[n]) - len(prompts[n]) for n in prompts) < 20:
        rows, right = [], {}
        for number, prompt in prompts.items():
            done = len(wide.tokens[number]) - len(prompt)
            if done > 24:
                continue
            drafts = truth[number][done : done + int(rng.integers(0, 4))]
            wrong_at = int(rng.integers(0, 5))
            if wrong_at < len(drafts):
                drafts[wrong_at] = (drafts[wrong_at] + 1) % VOCAB
            right[number] = min(wrong_at, len(drafts))
            rows.append(wide.row(number, drafts=drafts))
        with spoiled_buffers(wide):
            outputs = wide.step(rows)
        for row in outputs:
            assert row.num_accepted_drafts == right[row.seq_id]
            accepted += right[row.seq_id]
    assert accepted > 10 and num_replays(wide) > before
    for number, prompt in prompts.items():
        tokens = wide.finish(number)[len(prompt) :]
        assert tokens == truth[number][: len(tokens)]
    clear(wide)


# -- ranks ----------------------------------------------------------------------------------------


def test_two_ranks_with_captured_graphs_give_the_tokens_of_one(
    folder: Path, tensor_library: str, tmp_path: Path
) -> None:
    prompts = {1: [5, 6, 7, 8], 2: [40, 41], 3: [99, 3, 8]}
    kinds = {1: GREEDY, 2: SamplingParams(temperature=0.7, repetition_penalty=1.1), 3: GREEDY}
    address = tmp_path / "ranks"
    address.mkdir(mode=0o700)
    config = engine_config(folder, tensor_library, tp=2)
    ranks: list[Any] = [None, None]
    barrier = threading.Barrier(2, timeout=60)
    messages: list[SchedulerOutput] = []
    failures: list[BaseException] = []

    def make(rank: int) -> Worker:
        ranks[rank] = make_worker(config, rank=rank, world_size=2, address=str(address))
        ranks[rank].resolved = OnCapturingDevice(ranks[rank].resolved)
        ranks[rank].load()
        return ranks[rank]

    def follow() -> None:
        try:
            worker = make(1)
            worker.initialize_cache(256, 0)
            while True:
                barrier.wait()
                if not messages:
                    return
                worker.launch(messages[-1]).wait()
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        leader = Steps(make(0))
        for number, prompt in prompts.items():
            leader.add(number, prompt, kinds[number], seed=50 + number)
        chosen = [list(prompts)] * 5 + [[1, 3]] * 3 + [list(prompts)] * 2
        for ids in chosen:
            messages.append(leader.message([leader.row(n) for n in ids]))
            barrier.wait()
            leader.take(ranks[0].launch(messages[-1]).wait())
        messages.clear()
        barrier.wait()
    finally:
        thread.join(60)
    assert not failures
    single = make_worker(engine_config(folder, tensor_library))
    single.load()
    alone = Steps(single)
    for number, prompt in prompts.items():
        tokens = leader.tokens[number][len(prompt) :]
        assert tokens == alone.alone(prompt, len(tokens), kinds[number], 50 + number)
    assert any(work.num_replays for work in ranks[1].device.recorded)
    for worker in (*ranks, single):
        worker.close()
