"""The worker as a whole: start-up, memory arithmetic, refusals, tensor parallel ranks."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fastdeploy_core.config import BatchConfig
from fastdeploy_core.contracts.device import DeviceLimits, MemoryInfo, StepBuckets
from fastdeploy_core.errors import CapabilityError, FastDeployError, ResourceError, WorkerError
from fastdeploy_core.kvcache import MemoryProfile
from fastdeploy_core.memory import host_pages
from fastdeploy_core.memory.low_water import LowWater
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.types import BlockCopies, SamplingParams, SchedulerOutput
from fastdeploy_core.worker.graph_sizes import prompt_ladder
from fastdeploy_core.worker.start_up import unlike_steps
from fastdeploy_core.worker.worker import Worker, largest_steps
from tests.worker_steps import (
    BLOCK_SIZE,
    LLAMA,
    Steps,
    engine_config,
    make_worker,
    sharpen,
    write_model,
)

GIB = 1024**3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def test_load_tells_what_the_scheduler_needs(folder: Path, tensor_library: str) -> None:
    config = engine_config(folder, tensor_library, cache={"num_blocks_override": None})
    worker = make_worker(config)
    info = worker.load()
    # 2 layers, keys and values, 2 heads of 8 numbers of 4 bytes
    assert info.bytes_per_block == 2 * 2 * BLOCK_SIZE * 2 * 8 * 4
    assert (info.num_layers, info.vocab_size, info.max_model_len) == (2, 131, 96)
    assert info.available_bytes >= info.bytes_per_block * 8 * -(-96 // BLOCK_SIZE)
    assert info.tensor_library == tensor_library and info.device == "cpu"
    assert info.overlap and info.host_tier and info.block_sharing
    assert any("memory:" in line for line in info.report)
    hidden, inner, kv = LLAMA["hidden_size"], LLAMA["intermediate_size"], 2 * 8
    a_layer = 2 * hidden * (hidden + kv) + 3 * hidden * inner + 2 * hidden
    # Whatever others take of the host's memory meanwhile.
    assert info.weight_bytes == 4 * (2 * a_layer + 2 * 131 * hidden + hidden)
    assert worker._runner.slots.slot_of == {}, "the profile leaves no sequence behind"
    copies = BlockCopies(device_to_device=[(0, 1)])
    with pytest.raises(WorkerError, match="were not allocated"):
        worker.launch(SchedulerOutput(step_id=1, copies=copies))
    worker.close()
    with pytest.raises(WorkerError, match="load"):
        worker.launch(SchedulerOutput(step_id=2))


def test_memory_can_be_set_instead_of_measured(folder: Path, tensor_library: str) -> None:
    cache = {"num_blocks_override": None, "kv_cache_memory_bytes": 123456}
    worker = make_worker(engine_config(folder, tensor_library, cache=cache))
    info = worker.load()
    assert info.available_bytes == 123456
    assert "kv-cache-memory" in info.memory_arithmetic
    worker.close()


def test_the_profile_runs_the_largest_prefill_and_the_widest_batch(
    folder: Path, tensor_library: str
) -> None:
    config = engine_config(folder, tensor_library, cache={"block_size": 16})
    config = dataclasses.replace(
        config, batch=BatchConfig(max_num_seqs=7, max_num_batched_tokens=250)
    )
    steps, num_blocks = largest_steps(config)
    assert steps[0].rows.counts.tolist() == [96, 96, 58]
    assert steps[1].rows.counts.tolist() == [1] * 7
    assert steps[1].finished_seq_ids == steps[0].rows.seq_ids.tolist()
    assert num_blocks == 6 + 6 + 4
    small, _ = largest_steps(config, 8)
    assert small[0].rows.counts.tolist() == [12, 12, 8]
    assert small[1].rows.counts.tolist() == [1] * 7
    for step in steps:
        blocks = [b for new in step.new_sequences for b in new.block_ids]
        assert sorted(blocks) == list(range(len(blocks)))


@pytest.mark.parametrize(
    ("tokens", "seqs", "lengths"), [(250, 7, 96), (4096, 300, 8192), (32, 1, 96), (8, 2, 96)]
)
def test_steps_for_which_kernels_differ_are_steps_that_can_be(
    folder: Path, tensor_library: str, tokens: int, seqs: int, lengths: int
) -> None:
    """Prompts of many lengths beside up to as many rows, and beside rows of a few tokens."""
    config = engine_config(folder, tensor_library, cache={"block_size": 16})
    batch = BatchConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    model = dataclasses.replace(config.model, max_model_len=lengths)
    config = dataclasses.replace(config, batch=batch, model=model)
    (*_, before), num_blocks = largest_steps(config)
    steps = unlike_steps(config, before)
    counts = [step.rows.counts for step in steps]
    most = min(tokens, lengths)
    ladder = [n for n in (4, 16, 32, *prompt_ladder(most)) if n <= most]
    few = [n for n in (2, 4, 8) if n <= most]
    assert [int(c.sum()) for c in counts] == [*ladder, *few, *[32] * (3 * (most >= 32))]
    assert all(c.size <= seqs and c.max() <= lengths for c in counts)
    assert [c.tolist() for c in counts[len(ladder) :]][: len(few)] == [[n] for n in few]
    assert max(c.size for c in counts) == min(seqs, max(ladder) // 2)
    if seqs > 1 and most >= 32:
        assert [c.tolist() for c in counts[-3:]] == [[2, 30], [4, 28], [8, 24]]
    for last, step in itertools.pairwise([before, *steps]):
        assert step.finished_seq_ids == [new.seq_id for new in last.new_sequences]
        assert not {new.seq_id for new in step.new_sequences} & {*step.finished_seq_ids}
        assert all(max(new.block_ids) < num_blocks for new in step.new_sequences)


def test_the_arithmetic_of_device_memory() -> None:
    profile = MemoryProfile(
        total_bytes=80 * GIB,
        free_bytes=50 * GIB,
        weight_bytes=20 * GIB,
        step_bytes=6 * GIB,
        utilization=0.9,
    )
    assert profile.available_bytes == int(80 * GIB * 0.9) - 30 * GIB - 6 * GIB
    text = profile.arithmetic()
    for part in ("80.00 GiB x 0.9", "30.00 GiB in use", "weights 20.00", "6.00 GiB", "= 36.00 GiB"):
        assert part in text
    small = dataclasses.replace(profile, weight_bytes=5 * 2**20)
    assert "weights 5.0 MiB" in small.arithmetic()


def test_engines_that_share_a_device_count_what_is_their_own() -> None:
    second = MemoryProfile(
        total_bytes=80 * GIB,
        free_bytes=24 * GIB,
        weight_bytes=20 * GIB,
        step_bytes=2 * GIB,
        utilization=0.45,
        others_bytes=36 * GIB,
    )
    assert second.available_bytes == int(80 * GIB * 0.45) - 20 * GIB - 2 * GIB
    assert second.available_bytes <= second.free_bytes - second.step_bytes
    assert "20.00 GiB in use" in second.arithmetic()


def test_host_memory_is_left_to_others_and_divided_among_ranks() -> None:
    profile = MemoryProfile(
        total_bytes=64 * GIB,
        free_bytes=40 * GIB,
        weight_bytes=0,
        step_bytes=0,
        utilization=0.9,
        shared_with=2,
        most_bytes=100 * GIB,
    )
    assert profile.available_bytes == 10 * GIB
    small = dataclasses.replace(profile, most_bytes=3 * GIB)
    assert small.available_bytes == 3 * GIB


def test_low_water_sees_what_was_only_taken_for_a_moment() -> None:
    levels = iter([100, 90, 40, 95])
    seen: list[int] = []
    below = threading.Event()

    def memory() -> MemoryInfo:
        level = next(levels, 95)
        seen.append(level)
        if level == 40:
            below.set()
        return MemoryInfo(total_bytes=100, free_bytes=level)

    with LowWater(memory) as water:
        assert below.wait(60)
    assert water.free_bytes == 40
    assert seen[0] == 100


class Cramped(CpuDevice):
    """A processor with limits of its own; its memory is where the test says."""

    limits_change: ClassVar[dict[str, Any]] = {}
    oom_after: ClassVar[int | None] = None

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.limits: DeviceLimits = dataclasses.replace(self.limits, **self.limits_change)
        self._calls = 0

    def to_device(self, array: np.ndarray) -> Any:
        self._calls += 1
        if self.oom_after is not None and self._calls > self.oom_after:
            raise MemoryError("no more")
        return super().to_device(array)

    def is_lost(self, error: BaseException) -> bool:
        return "gone" in str(error)


class Recording(CpuDevice):
    """Copies every upload and remembers what it was: the contract lets a device copy later, so the
    host must never change an array it handed over."""

    uploads: ClassVar[list[tuple[np.ndarray, np.ndarray]]] = []

    def to_device(self, array: np.ndarray) -> Any:
        self.uploads.append((array, array.copy()))
        return super().to_device(array.copy())


def cramped(
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[CpuDevice] = Cramped,
    **attributes: Any,
) -> Worker:
    for name, value in attributes.items():
        monkeypatch.setattr(kind, name, value)
    worker = make_worker(config)
    load = worker.resolved.load

    class Resolved:
        tensor_library = worker.resolved.tensor_library
        plugin_entries = staticmethod(worker.resolved.plugin_entries)

        @staticmethod
        def load(driver: str, name: str = "") -> Any:
            return kind if driver == "device" else load(driver, name)

    worker.resolved = Resolved()
    return worker


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"block_sizes": (16, 32)}, "--block-size 16 | 32"),
        ({"max_tensor_parallel_size": 1}, "tensor-parallel-size is 2"),
    ],
)
def test_what_the_device_cannot_do_is_refused_before_weights_are_read(
    folder: Path,
    tensor_library: str,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    word: str,
) -> None:
    config = engine_config(folder, tensor_library)
    worker = cramped(config, monkeypatch, limits_change=change)
    if "max_tensor_parallel_size" in change:
        worker.world_size = 2
    with pytest.raises(CapabilityError, match=word.replace("|", r"\|")):
        worker.load()


def test_batches_are_padded_where_the_device_wants_certain_sizes(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(folder, tensor_library)
    free = make_worker(config)
    buckets = StepBuckets((1, 2), (4, 16, 64), (3, 4), (2, 6))
    change = {"step_buckets": buckets, "mixed_batches": False}
    padded = cramped(config, monkeypatch, limits_change=change)
    sizes, tokens = [], []
    for worker in (free, padded):
        worker.load()
        sharpen(worker)
        forward = worker._runner._model.forward

        def record(ids: Any, positions: Any, context: Any, run: Any = forward) -> Any:
            batch = context.batch
            tables = tuple(batch.block_tables_dev.shape)
            assert ids.shape[0] == positions.shape[0] == batch.num_tokens
            sizes.append((batch.num_tokens, *tables, batch.seq_lens_dev.shape[0]))
            return run(ids, positions, context)

        monkeypatch.setattr(worker._runner._model, "forward", record)
        steps = Steps(worker)
        warm = set(sizes)
        sizes.clear()
        steps.add(1, [5, 6, 7, 8])
        steps.add(2, [9, 10, 11], SamplingParams())
        steps.step([steps.row(1), steps.row(2, 2)])
        steps.step([steps.row(1), steps.row(2)])
        ahead = steps.launch([steps.row(1), steps.row(2)])
        later = steps.launch([steps.row(1), steps.row(2)])  # from the device, all of it
        steps.take(ahead.wait())
        steps.take(later.wait())
        ahead = steps.launch([steps.row(1)])
        steps.add(3, [12, 13])
        later = steps.launch([steps.row(1), steps.row(3)])  # some from the device
        steps.take(ahead.wait())
        steps.take(later.wait())
        tokens.append({number: list(known) for number, known in steps.tokens.items()})
        for length in (17, 60):
            steps.add(length, list(range(3, 3 + length)))
            steps.step([steps.row(length)])
            tokens[-1][length] = steps.finish(length)
        if worker is padded:
            steps.add(4, list(range(3, 70)))
            with pytest.raises(WorkerError, match="67 tokens; the device takes at most 64"):
                steps.launch([steps.row(4)])
        worker.close()
    assert tokens[0] == tokens[1]
    assert len(tokens[0][1]) == 10
    assert set(sizes) <= warm, "a shape was met that was not run before"
    assert {(tokens // rows, rows) for tokens, rows, _, _ in sizes} == {(4, 2), (64, 1), (1, 3)}
    assert all(rows == lengths for _, rows, _, lengths in sizes)


def test_arrays_handed_to_the_device_are_never_changed(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[tuple[np.ndarray, np.ndarray]] = []
    names = ("LogitBiasLogitsProcessor",)
    config = engine_config(folder, tensor_library, logits_processors=names)
    worker = cramped(config, monkeypatch, Recording, uploads=uploads)
    worker.load()
    steps = Steps(worker, num_host_blocks=8)
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.9, logprobs=2, prompt_logprobs=1),
        SamplingParams(frequency_penalty=0.5, bad_words_token_ids=[[1, 2], [3]], min_tokens=9),
        SamplingParams(allowed_token_ids=[5, 6, 7], logit_bias={5: 1.0}),
        SamplingParams(logits_processors_args={"logit_bias": {"5": 1.0}}),
    ]
    pending: list[Any] = []
    for number in range(40):
        for seq_id, params in enumerate(kinds):
            if seq_id not in steps.tokens:
                steps.add(seq_id, [seq_id + 5, 6, 7, 8, 9], params)
        rows = [steps.row(n, 2 if number % 3 else None) for n in range(5) if (n + number) % 4]
        copies = BlockCopies(device_to_host=[(0, 1)], host_to_device=[(1, 0)])
        pending.append(steps.launch(rows, copies if number % 5 == 0 else None))
        if len(pending) > 2:
            steps.take(pending.pop(0).wait())
        if number % 7 == 6 and not pending:
            steps.finish(number % 5)
        if number % 7 == 5:
            while pending:
                steps.take(pending.pop(0).wait())
    assert len(uploads) > 300
    for array, before in uploads:
        assert array.tobytes() == before.tobytes()
    worker.close()


def test_what_was_turned_off_is_said(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(folder, tensor_library, cache={"swap_space_bytes": GIB})
    change = {"overlap": False, "host_tier": False, "block_sharing": False}
    worker = cramped(config, monkeypatch, limits_change=change)
    info = worker.load()
    lines = [line for line in info.report if line.startswith("turned off")]
    assert len(lines) == 3 and not info.overlap and not info.host_tier
    worker.close()


def test_running_out_of_memory_in_a_step_is_told_as_such(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = cramped(engine_config(folder, tensor_library), monkeypatch)
    worker.load()
    sharpen(worker)
    steps = Steps(worker)
    truth = steps.alone([5, 6, 7], 3, SamplingParams(temperature=0), 1)
    steps.add(1, [5, 6, 7])
    steps.step([steps.row(1)])
    saved = {key: list(value) for key, value in steps.blocks.items()}, dict(steps.computed)
    monkeypatch.setattr(Cramped, "oom_after", 0)
    with pytest.raises(ResourceError, match="max-num-batched-tokens"):
        steps.launch([steps.row(1)])
    monkeypatch.setattr(Cramped, "oom_after", None)
    steps.blocks, steps.computed = saved  # the engine tries the same step again
    for _ in range(2):
        steps.step([steps.row(1)])
    assert steps.tokens[1][3:] == truth
    worker.close()


def test_a_lost_device_is_a_worker_error(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = cramped(engine_config(folder, tensor_library), monkeypatch)
    worker.load()
    steps = Steps(worker)

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(worker._runner._model, "forward", fail)
    steps.add(1, [5, 6, 7])
    with pytest.raises(WorkerError, match="lost"):
        steps.launch([steps.row(1)])
    worker.close()


def test_weights_that_do_not_fit_are_explained(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = cramped(engine_config(folder, tensor_library), monkeypatch, oom_after=0)
    with pytest.raises(ResourceError, match=r"weights do not fit.*--tensor-parallel-size"):
        worker.load()


def test_a_cache_that_does_not_fit_is_explained(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = cramped(engine_config(folder, tensor_library), monkeypatch)
    worker.load()

    def no_memory(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(host_pages.mmap, "mmap", no_memory)
    with pytest.raises(ResourceError, match="does not fit"):
        worker.initialize_cache(1000, 0)


def test_two_ranks_give_the_tokens_of_one(
    folder: Path, tensor_library: str, tmp_path: Path
) -> None:
    """Both ranks in threads of this process, with the device's own collectives between them."""
    prompts = {1: [5, 6, 7, 8], 2: [40, 41], 3: [99, 3, 8]}
    kinds = {
        1: SamplingParams(temperature=0),
        2: SamplingParams(temperature=0.7, repetition_penalty=1.1, prompt_logprobs=1),
        3: SamplingParams(min_tokens=5, stop_token_ids=[9]),
    }
    single = make_worker(engine_config(folder, tensor_library))
    single.load()
    steps = Steps(single)
    truth = {n: steps.alone(prompts[n], 8, kinds[n], 50 + n) for n in prompts}
    single.close()

    address = tmp_path / "ranks"
    address.mkdir(mode=0o700)
    config = engine_config(folder, tensor_library, tp=2)
    ranks = [make_worker(config, rank=r, world_size=2, address=str(address)) for r in range(2)]
    barrier = threading.Barrier(2, timeout=60)
    messages: list[SchedulerOutput] = []
    failures: list[BaseException] = []
    leader = Steps.__new__(Steps)

    def follow() -> None:
        try:
            ranks[1].load()
            barrier.wait()
            ranks[1].initialize_cache(256, 0)
            while True:
                barrier.wait()
                if not messages:
                    return
                pending = ranks[1].launch(messages[-1])
                barrier.wait()
                assert pending.wait().token_ids.size == 0
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        ranks[0].load()
        barrier.wait()
        leader.__init__(ranks[0])  # type: ignore[misc]
        for number, prompt in prompts.items():
            leader.add(number, prompt, kinds[number], seed=50 + number)
        for _ in range(8):
            rows = [leader.row(n) for n in prompts]
            messages.append(leader.message(rows))
            barrier.wait()
            pending = ranks[0].launch(messages[-1])
            barrier.wait()
            leader.take(pending.wait())
        messages.clear()
        barrier.wait()
    finally:
        thread.join(60)
    assert not failures
    for number, prompt in prompts.items():
        tokens = leader.tokens[number][len(prompt) :]
        assert tokens[:8] == truth[number][: len(tokens)][:8]
    for rank in ranks:
        rank.close()


def test_errors_of_the_worker_are_of_this_project(folder: Path, tensor_library: str) -> None:
    worker = make_worker(engine_config(folder, tensor_library))
    with pytest.raises(FastDeployError, match="load"):
        worker.initialize_cache(1, 0)
