"""The model runner on the reference device: whatever shares a batch, tokens are those of being
alone."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.config import SpeculativeConfig
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.errors import WorkerError
from fastdeploy_core.memory.block_mover import BlockMover
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.types import BlockCopies, SamplingParams, SequenceExtras
from tests.worker_steps import (
    VOCAB,
    Row,
    RowOutput,
    Steps,
    engine_config,
    make_worker,
    sharpen,
    write_model,
)


@pytest.fixture(scope="module")
def steps(tensor_library: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    folder = write_model(tmp_path_factory.mktemp("llama"))
    names = ("LogitBiasLogitsProcessor",)
    worker = make_worker(
        engine_config(folder, tensor_library, max_num_seqs=6, logits_processors=names)
    )
    worker.load()
    sharpen(worker)
    made = Steps(worker, num_blocks=256, num_host_blocks=64)
    yield made
    assert not made.tokens, "every test gives its sequences back"
    worker.close()


@pytest.fixture(scope="module")
def drafted(tensor_library: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    """A worker that may hold drafts; the tests say which."""
    folder = write_model(tmp_path_factory.mktemp("llama"))
    speculative = SpeculativeConfig("ngram_match", 3)
    worker = make_worker(engine_config(folder, tensor_library, speculative=speculative))
    worker.load()
    sharpen(worker)
    yield Steps(worker)
    worker.close()


def clear(steps: Steps) -> None:
    """Forget what a test left, and tell the worker."""
    for seq_id in list(steps.tokens):
        steps.finish(seq_id)
    steps.launch([]).wait()


def random_params(rng: np.random.Generator) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0},
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 20, "min_p": 0.01},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"presence_penalty": 1.0},
        {"temperature": 0, "bad_words_token_ids": [[51, 130], [35, 13], [9]]},
        {"min_tokens": 4, "stop_token_ids": [7, 8]},
        {"logit_bias": {3: 4.0}, "allowed_token_ids": list(range(3, 90))},
        {"temperature": 0, "logits_processors_args": {"logit_bias": {"51": -9.0}}},
    ]
    return SamplingParams(max_tokens=50, **kinds[int(rng.integers(len(kinds)))])


class Life:
    """Random arrivals, chunks, orders, preemptions, swaps and steps launched ahead."""

    def __init__(self, steps: Steps, rng: np.random.Generator, num_sequences: int) -> None:
        self.steps, self.rng = steps, rng
        self.waiting: list[tuple[int, list[int], SamplingParams, int]] = [
            (
                number,
                rng.integers(3, VOCAB, int(rng.integers(1, 25))).tolist(),
                random_params(rng),
                int(rng.integers(2**63)),
            )
            for number in range(num_sequences)
        ]
        self.all = list(self.waiting)
        self.running: dict[int, tuple[int, list[int], SamplingParams, int]] = {}
        self.wanted = {entry[0]: int(rng.integers(3, 14)) for entry in self.all}
        self.results: dict[int, list[int]] = {}
        self.pending: list[Any] = []
        self.swapped: list[tuple[int, int]] = []

    def run(self) -> dict[int, list[int]]:
        while self.waiting or self.running or self.pending:
            self.arrive()
            if self.pending and (self.rng.random() < 0.6 or len(self.pending) > 1):
                self.collect()
            if not self.pending and self.running and self.rng.random() < 0.15:
                self.preempt()
            rows = self.rows()
            if rows:
                self.pending.append(self.steps.launch(rows, self.swap()))
            elif self.pending:
                self.collect()
        return self.results

    def arrive(self) -> None:
        while self.waiting and len(self.running) < 6 and self.rng.random() < 0.6:
            entry = self.waiting.pop(0)
            number, prompt, params, seed = entry
            self.running[number] = entry
            self.steps.add(number, prompt, params, seed=seed)

    def rows(self) -> list[Row]:
        chosen = [n for n in self.running if self.rng.random() < 0.85]
        self.rng.shuffle(chosen)
        rows = []
        for number in chosen:
            known = len(self.steps.tokens[number]) - len(self.running[number][1])
            ahead = len(self.pending)
            if known + ahead >= self.wanted[number]:
                continue  # may be done already when what is in flight arrives
            chunk = int(self.rng.integers(1, 9)) if self.rng.random() < 0.5 else None
            rows.append(self.steps.row(number, chunk))
        return rows

    def collect(self) -> None:
        for row in self.steps.take(self.pending.pop(0).wait()):
            assert row.error is None, row.error
        for number in list(self.running):
            prompt = self.running[number][1]
            if len(self.steps.tokens[number]) - len(prompt) >= self.wanted[number]:
                self.results[number] = self.steps.finish(number)[len(prompt) :]
                del self.running[number]

    def preempt(self) -> None:
        number = int(self.rng.choice(list(self.running)))
        _, prompt, params, seed = self.running[number]
        if number not in self.steps.new:
            self.steps.preempt(number, len(prompt), params, seed=seed)

    def swap(self) -> BlockCopies | None:
        """Move some sequence's blocks to the host and back into other device blocks."""
        steps = self.steps
        settled = [n for n in self.running if n not in steps.new and steps.blocks[n]]
        if self.pending or not settled or self.rng.random() < 0.8:
            return None
        number = settled[0]
        old = steps.blocks[number]
        if steps.worker._runner.slots.num_blocks[steps.worker._runner.slots.slot_of[number]] != len(
            old
        ):
            return None  # this very step appends blocks
        host = self.rng.permutation(64)[: len(old)].tolist()
        # The table stays as it is: out to the host, the device blocks are overwritten, and back.
        other = steps.free[-1]
        return BlockCopies(
            device_to_host=list(zip(old, host, strict=True)),
            host_to_device=list(zip(host, old, strict=True)),
            device_to_device=[(old[0], other)],
        )


@pytest.mark.parametrize("seed", range(24))
def test_any_mix_gives_every_sequence_the_tokens_it_has_alone(steps: Steps, seed: int) -> None:
    rng = np.random.default_rng(seed)
    life = Life(steps, rng, num_sequences=12)
    results = life.run()
    for number, prompt, params, draw_seed in life.all:
        alone = steps.alone(prompt, life.wanted[number], copy.deepcopy(params), draw_seed)
        assert results[number] == alone, (number, params)
    clear(steps)


def test_blocks_come_back_from_the_host_as_they_went(steps: Steps) -> None:
    runner = steps.worker._runner
    steps.add(1, list(range(3, 20)))
    steps.step([steps.row(1)])
    blocks = steps.blocks[1]
    before = [
        np.array(runner._device.to_host(t)[blocks])
        for cache in runner.caches.tensors
        for t in cache
    ]
    targets = [steps.free.pop() for _ in blocks]
    host = list(range(len(blocks)))
    steps.launch([], BlockCopies(device_to_host=list(zip(blocks, host, strict=True)))).wait()
    steps.launch([], BlockCopies(host_to_device=list(zip(host, targets, strict=True)))).wait()
    after = [
        np.array(runner._device.to_host(t)[targets])
        for cache in runner.caches.tensors
        for t in cache
    ]
    for left, right in zip(before, after, strict=True):
        assert np.abs(left).sum() > 0
        assert (left == right).all()
    steps.free += targets
    clear(steps)


def test_bits_of_the_narrowest_dtype_survive_the_host(tensor_library: str) -> None:
    device = CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))
    xp = device.xp
    dtype = xp.dtype(xp.cpu_matmul_dtypes[-1])  # bfloat16 where the library computes in it
    with xp.no_grad():
        pools = []
        for number in range(4):
            values = np.random.default_rng(number).normal(size=(8, 4, 2, 6)).astype(np.float32)
            pools.append(xp.from_numpy(values).to(dtype))
        mover = BlockMover(
            device, build_kernel_table("cpu"), [tuple(pools[:2]), tuple(pools[2:])], 6
        )
        before = [np.array(xp.to_numpy(pool)) for pool in pools]
        mover.apply(BlockCopies(device_to_host=[(1, 5), (3, 0)], host_to_device=[(0, 6), (5, 7)]))
        after = [np.array(xp.to_numpy(pool)) for pool in pools]
    for left, right in zip(before, after, strict=True):
        assert (right[6] == left[3]).all() and (right[7] == left[1]).all()
        assert (right[:6] == left[:6]).all()


# -- drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(min_tokens=9, stop_token_ids=[4]),
        SamplingParams(temperature=0, repetition_penalty=1.2),
    ],
    ids=["greedy", "random", "min_tokens", "penalty"],
)
def test_drafts_never_change_tokens_only_how_many_come_at_once(
    drafted: Steps, params: SamplingParams
) -> None:
    steps = drafted
    prompt, count = [5, 6, 7, 8], 24
    truth = steps.alone(prompt, count, params, 77)
    rng = np.random.default_rng(3)
    steps.add(1, prompt, params, seed=77)
    steps.add(2, [9, 10], SamplingParams(temperature=0))
    steps.step([steps.row(1), steps.row(2)])
    accepted = 0
    while len(steps.tokens[1]) - len(prompt) < count - 4:
        done = len(steps.tokens[1]) - len(prompt)
        drafts = truth[done : done + 3]
        wrong_at = int(rng.integers(0, 5))
        if wrong_at < len(drafts):
            drafts[wrong_at] = (drafts[wrong_at] + 1) % VOCAB
        row, other = steps.step([steps.row(1, drafts=drafts), steps.row(2)])
        right = min(wrong_at, 3)
        assert row.num_accepted_drafts == right
        assert row.token_ids == truth[done : done + right + 1]
        assert len(other.token_ids) == 1
        accepted += right
    assert accepted > 5
    for _ in range(3):  # and plain steps go on from there
        steps.step([steps.row(1)])
    assert steps.tokens[1][len(prompt) :] == truth[: len(steps.tokens[1]) - len(prompt)]
    clear(steps)


# -- logprobs -------------------------------------------------------------------------------------


def test_prompt_logprobs_are_those_of_decoding_the_prompt(steps: Steps) -> None:
    prompt = [5, 9, 33, 120, 77, 64, 3, 18, 92, 41, 7]
    params = SamplingParams(temperature=0, prompt_logprobs=2, logprobs=2)
    by_chunk: dict[int, list[Any]] = {}
    for chunk in (3, 11):
        steps.add(1, prompt, params)
        got: list[Any] = []
        while len(steps.tokens[1]) == len(prompt):
            (row,) = steps.step([steps.row(1, chunk)])
            got += row.prompt_logprobs or []
        by_chunk[chunk] = got
        assert [r.token_ids[0] for r in got] == prompt[1:]
        clear(steps)
    for left, right in zip(by_chunk[3], by_chunk[11], strict=True):
        assert left.token_ids == right.token_ids and left.rank == right.rank
        assert np.allclose(left.logprobs, right.logprobs, atol=1e-5)
    for position, record in enumerate(by_chunk[11], start=1):
        steps.add(2, prompt[:position], SamplingParams(temperature=0, logprobs=-1))
        (row,) = steps.step([steps.row(2)])
        assert row.logprobs is not None
        every = dict(zip(row.logprobs[0].token_ids[1:], row.logprobs[0].logprobs[1:], strict=True))
        assert record.logprobs[0] == pytest.approx(every[prompt[position]], abs=1e-5)
        assert record.rank == 1 + sum(v > every[prompt[position]] + 1e-6 for v in every.values())
        assert record.token_ids[1:] == row.logprobs[0].token_ids[1:3]
        clear(steps)


def test_only_rows_that_ask_get_logprobs(steps: Steps) -> None:
    steps.add(1, [5, 6, 7], SamplingParams(temperature=0))
    steps.add(2, [5, 6, 7], SamplingParams(temperature=0, logprobs=0))
    steps.add(3, [5, 6, 7], SamplingParams(temperature=0, logprobs=4))
    first, second, third = steps.step([steps.row(1), steps.row(2), steps.row(3)])
    assert first.logprobs is None and first.prompt_logprobs is None
    assert second.logprobs is not None and len(second.logprobs[0].token_ids) == 1
    assert third.logprobs is not None and len(third.logprobs[0].token_ids) == 5
    assert third.logprobs[0].token_ids[:2] == [third.token_ids[0]] * 2
    assert second.logprobs[0].logprobs[0] == pytest.approx(third.logprobs[0].logprobs[0])
    clear(steps)


# -- failures -------------------------------------------------------------------------------------


def run_row(steps: Steps, seq_id: int, count: int) -> list[RowOutput]:
    return [steps.step([steps.row(seq_id)])[0] for _ in range(count)]


@contextmanager
def poisoned(steps: Steps, token: int) -> Iterator[None]:
    """The token's embedding is NaN: every row that holds it gets NaN logits, as from a bad
    kernel."""
    runner = steps.worker._runner
    weight = runner._loaded.model.embedding.weight
    with runner._xp.no_grad():
        kept = weight[token : token + 1].clone()
        weight[token : token + 1] = float("nan")
    yield
    with runner._xp.no_grad():
        weight[token : token + 1] = kept


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_fails_alone(steps: Steps, temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    truth = steps.alone([5, 6, 7], 4, params, 5)
    with poisoned(steps, 99):
        steps.add(1, [5, 6, 7], params, seed=5)
        steps.add(2, [8, 99, 4], params, seed=6)
        first = steps.launch([steps.row(1), steps.row(2)])
        # Launched before anybody saw the error: it runs, and the other row goes on.
        second = steps.launch([steps.row(1), steps.row(2)])
        for pending in (first, second):
            good, bad = steps.take(pending.wait())
            assert bad.error == "nan_logits" and not bad.token_ids
            assert good.error is None
        steps.finish(2)
        run_row(steps, 1, 2)
        assert steps.tokens[1][3:] == truth
    clear(steps)
    # Blocks that hold NaN are given out again; what lies after a sequence's end must not matter.
    assert steps.alone([5, 6, 7], 4, params, 5) == truth


def test_nan_in_prompt_logprobs_is_an_error_and_not_a_number(steps: Steps) -> None:
    with poisoned(steps, 99):
        steps.add(1, [99, 5, 6, 7], SamplingParams(temperature=0, prompt_logprobs=1))
        (row,) = steps.step([steps.row(1, 2)])
        assert row.error == "nan_logits" and row.prompt_logprobs is None
    clear(steps)


def test_parameters_the_worker_cannot_serve_fail_their_request_only(steps: Steps) -> None:
    truth = steps.alone([5, 6], 1, SamplingParams(temperature=0), 1)
    steps.add(1, [5, 6])
    steps.add(2, [5, 6], SamplingParams(allowed_token_ids=[VOCAB]))
    steps.add(3, [5, 6], SamplingParams(logits_processors_args={"logit_bias": {"x": 1}}))
    steps.add(4, [5, 6], SamplingParams(thinking_token_budget=3))  # this model has no tokenizer
    steps.add(5, [5, 6], grammar=b"broken", grammar_backend="llguidance")
    unknown = {"logit_bias": {"5": 1}, "logit_bais": {"5": 1}}
    steps.add(6, [5, 6], SamplingParams(logits_processors_args=unknown))
    rows = steps.step([steps.row(n) for n in (1, 2, 3, 4, 5, 6)])
    assert rows[0].token_ids == truth
    for row in rows[1:]:
        assert row.error is not None and row.error.startswith("InvalidRequest:")
        assert not row.token_ids
    assert str(rows[2].error).startswith("InvalidRequest:logits_processors_args: ")
    assert "logits_processors_args.logit_bais; they take: logit_bias" in str(rows[5].error)
    clear(steps)
    steps.add(2, [5, 6])
    assert steps.step([steps.row(2)])[0].token_ids == truth, "the slot is clean again"
    clear(steps)


def test_nothing_possible_is_an_error_of_that_row(steps: Steps) -> None:
    steps.add(1, [5, 6], SamplingParams(allowed_token_ids=[9], bad_words_token_ids=[[9]]))
    steps.add(2, [5, 6])
    first, second = steps.step([steps.row(1), steps.row(2)])
    assert first.error == "no_possible_token" and second.error is None
    clear(steps)


def test_messages_that_make_no_sense_are_worker_errors_and_harm_nobody(steps: Steps) -> None:
    truth = steps.alone([5, 6, 7], 4, SamplingParams(temperature=0), 1)
    steps.add(1, [5, 6, 7])
    steps.step([steps.row(1)])
    end = steps.computed[1]
    for rows, word in (
        ([Row(999, 0, 1)], "999"),
        ([Row(1, end, 50)], "inconsistent"),
        ([Row(1, end, 1), Row(1, end, 1)], "inconsistent"),
        ([Row(1, 200, 1)], "inconsistent"),
        ([Row(1, end + 1, 1, [steps.free[0]])], "nobody knows"),
        ([Row(1, end, 1, list(range(60)))], "blocks"),
    ):
        with pytest.raises(WorkerError, match=word):
            steps.launch(rows)
    for copies in (
        BlockCopies(device_to_device=[(0, 256)]),
        BlockCopies(device_to_host=[(0, 64)]),
        BlockCopies(host_to_device=[(-1, 0)]),
    ):
        with pytest.raises(WorkerError, match="do not exist"):
            steps.launch([], copies)
    run_row(steps, 1, 3)
    assert steps.tokens[1][3:] == truth
    clear(steps)


def test_what_a_worker_does_not_serve_is_refused(steps: Steps) -> None:
    steps.add(1, [5, 6], extras=SequenceExtras(adapter="legal@1"))
    with pytest.raises(WorkerError, match="brings adapter"):
        steps.launch([steps.row(1)])
    assert 1 not in steps.worker._runner.slots.slot_of
    clear(steps)


def test_more_sequences_than_slots_is_refused(steps: Steps) -> None:
    for number in range(7):
        steps.add(number, [5, 6])
    rows = [steps.row(n) for n in range(7)]
    with pytest.raises(WorkerError, match="6 slots"):
        steps.launch(rows)
    clear(steps)


def test_a_finished_sequence_with_a_step_in_flight_leaves_no_trace(steps: Steps) -> None:
    truth = steps.alone([40, 41, 42], 5, SamplingParams(temperature=0), 1)
    steps.add(1, [5, 6, 7])
    steps.step([steps.row(1)])
    ahead = steps.launch([steps.row(1)])
    steps.finish(1)
    steps.add(2, [40, 41, 42])  # takes the same slot before the step in flight was read
    later = steps.launch([steps.row(2)])
    assert steps.worker._runner.slots.slot_of == {2: 0}
    ahead.wait()  # its token stands where the new sequence will have another one
    third = steps.launch([steps.row(2)])
    steps.take(later.wait())
    steps.take(third.wait())
    run_row(steps, 2, 3)
    assert steps.tokens[2][3:] == truth
    clear(steps)


def test_one_thread_launches_while_another_waits(steps: Steps) -> None:
    """As the executor does it; no token is lost or mixed up, however far launching is ahead."""
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0, repetition_penalty=1.2),
        SamplingParams(temperature=0, bad_words_token_ids=[[51, 130], [10, 51]]),
        SamplingParams(logprobs=1),
        SamplingParams(temperature=0, logits_processors_args={"logit_bias": {"5": 1.0}}),
    ]
    prompts = [[number + 5, number + 9, 7] for number in range(6)]
    truth = [steps.alone(prompts[n], 60, kinds[n], 300 + n) for n in range(6)]
    for number in range(6):
        steps.add(number, prompts[number], kinds[number], seed=300 + number)
    launched: queue.Queue[Any] = queue.Queue(maxsize=3)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            while (pending := launched.get()) is not None:
                steps.take(pending.wait())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(60):
        launched.put(steps.launch([steps.row(n) for n in range(6)]), timeout=60)
    launched.put(None)
    thread.join(60)
    assert not failures
    for number in range(6):
        assert steps.tokens[number][3:] == truth[number], kinds[number]
    clear(steps)
