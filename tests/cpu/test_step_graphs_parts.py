"""What captured steps are made of: the ladder, the choice of sizes, state kernels, copies,
failures."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.config import GraphConfig
from fastdeploy_core.contracts.device import (
    DeviceLimits,
    DeviceOptions,
    MemoryInfo,
    StepBuckets,
)
from fastdeploy_core.errors import ResourceError, WorkerError
from fastdeploy_core.memory.transfers import Downloads, Uploads
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.worker.graph_sizes import graph_sizes, ladder
from fastdeploy_core.worker.worker import Worker
from fastdeploy_testing.capturing import (
    CapturingDevice,
    OnCapturingDevice,
    RecordableAttention,
)
from tests.worker_steps import Steps, engine_config, make_worker, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def device(tensor_library: str) -> CapturingDevice:
    return CapturingDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (130, (1, 2, 4, *range(8, 129, 8), 130)),
        (256, (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16))),
        (300, (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), 288, 300)),
        (512, (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32))),
        (4000, (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32))),
    ],
)
def test_the_ladder_is_fastdeploys(rows: int, expected: tuple[int, ...]) -> None:
    assert ladder(rows) == expected


class Unable(RecordableAttention):
    name, can_capture_decode = "unable", False


class Short(RecordableAttention):
    name, max_recorded_len = "short", 16


CAPABLE = DeviceLimits(graph_capture=True)


@pytest.mark.parametrize(
    ("graphs", "limits", "drivers", "ranks", "sizes", "words"),
    [
        ({}, CAPABLE, [RecordableAttention], 1, (1, 2, 4, 8), "4 sizes, 1 to 8 rows"),
        ({"enabled": False}, CAPABLE, [RecordableAttention], 1, (), "as asked"),
        ({}, DeviceLimits(), [RecordableAttention], 1, (), "device captures no graphs"),
        ({}, CAPABLE, [RecordableAttention, Unable], 1, (), "driver unable cannot"),
        ({}, CAPABLE, [RecordableAttention, Short], 1, (), "too long"),
        ({}, CAPABLE, [RecordableAttention], 2, (), "collectives"),
        ({"sizes": (3, 5, 9)}, CAPABLE, [RecordableAttention], 1, (3, 5), "2 sizes, 3 to 5"),
        ({"max_size": 5}, CAPABLE, [RecordableAttention], 1, (1, 2, 4, 5), "1 to 5"),
        ({"sizes": (2, 4, 8), "max_size": 4}, CAPABLE, [RecordableAttention], 1, (2, 4), "to 4"),
        ({"sizes": (9, 99)}, CAPABLE, [RecordableAttention], 1, (), "no size up to 8"),
        (
            {},
            dataclasses.replace(CAPABLE, step_buckets=StepBuckets((1,), (64,), (2, 6, 64), (1,))),
            [RecordableAttention],
            1,
            (2, 6),
            "2 to 6",
        ),
    ],
)
def test_which_sizes_are_captured_and_why_not(
    folder: Path,
    graphs: dict[str, Any],
    limits: DeviceLimits,
    drivers: list[Any],
    ranks: int,
    sizes: tuple[int, ...],
    words: str,
) -> None:
    config = engine_config(folder, "torch", max_num_seqs=8)
    config = dataclasses.replace(config, graphs=GraphConfig(**graphs))
    found, line = graph_sizes(config, limits, drivers, ranks)
    assert found == sizes
    assert words in line


# -- kernels around a step ------------------------------------------------------------------------


def state(rng: np.random.Generator, num_slots: int, drafts: int) -> dict[str, np.ndarray]:
    """Slots as a device holds them; the last one is nobody's."""
    state = {
        "tables": rng.permutation(100)[: num_slots * 5].reshape(num_slots, 5).astype(np.int32),
        "num_computed": rng.integers(0, 14, num_slots),
        "newest": rng.integers(1, 99, num_slots),
        "drafts": rng.integers(1, 99, (num_slots, drafts)),
        "num_drafts": rng.integers(0, drafts + 1, num_slots),
        "room": rng.integers(8, 20, num_slots),
    }
    for value in state.values():
        value[-1] = 0
    return state


TURN = 2**31 - 1


def a_box(device: CapturingDevice) -> tuple[Any, Any]:
    """What a kernel posts to, in the last turn whose number is positive in 32 bits."""
    put = CpuDevice.to_device
    return put(device, np.full((3, 6, 6), -5, np.int64)), put(device, np.array([TURN]))


def check_box(device: CapturingDevice, post: tuple[Any, Any], values: np.ndarray) -> None:
    """The turn's page, and nothing else, holds these values beside the turn."""
    box = np.array(device.to_host(post[0]))
    rows, width = values.shape
    page = box[TURN % 3, :rows, :width]
    assert (page >> 32 == TURN).all() and ((page << 32) >> 32 == values).all()
    box[TURN % 3, :rows, :width] = -5
    assert (box == -5).all()


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_prepare_decode_is_what_a_slow_loop_says(
    device: CapturingDevice, width: int, seed: int
) -> None:
    rng, block_size, num_slots = np.random.default_rng(seed), 4, 6
    given = state(rng, num_slots, 3)
    rows = np.array([2, 4, 0, 5, 5])
    put = CpuDevice.to_device
    tensors = [put(device, value.copy()) for value in given.values()]
    out = [np.full(5 * width, -9, np.int64) for _ in range(3)]
    out += [np.full(5, -9, np.int32), np.full((5, 5), -9, np.int32)]
    outputs = [put(device, array) for array in out]
    turn = put(device, np.array([41]))
    given_tensors = (put(device, rows), *tensors, block_size, turn)
    build_kernel_table("cpu")["prepare_decode"](*given_tensors, *outputs)
    assert device.to_host(turn).tolist() == [42]
    ids, positions, mapping, seq_lens, tables = (np.array(device.to_host(t)) for t in outputs)
    for row, slot in enumerate(rows.tolist()):
        start = int(given["num_computed"][slot])
        nobody = slot == num_slots - 1 or start >= given["room"][slot]
        assert seq_lens[row] == (0 if nobody else start + width)
        assert tables[row].tolist() == given["tables"][slot].tolist()
        for nth in range(width):
            place = row * width + nth
            if nobody or nth > given["num_drafts"][slot]:
                wanted = (0, 0 if nobody else start, -1)
            else:
                where = start + nth
                block = given["tables"][slot][where // block_size]
                token = given["newest"][slot] if nth == 0 else given["drafts"][slot][nth - 1]
                wanted = (token, where, block * block_size + where % block_size)
            assert (ids[place], positions[place], mapping[place]) == wanted


@pytest.mark.parametrize("num_results", [0, 2])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_keep_drafts_is_what_a_slow_loop_says(
    device: CapturingDevice, width: int, num_results: int, seed: int
) -> None:
    rng, vocab_size, limit = np.random.default_rng(seed), 50, int(seed + 1)
    given = state(rng, 6, 3)
    rows = np.array([3, 0, 2, 5, 5])
    proposals, results = rng.integers(-1, 60, (5, width)), rng.integers(-2, 60, (5, num_results))
    put = CpuDevice.to_device
    post = a_box(device)
    names = ("num_computed", "room", "drafts", "num_drafts")
    held = [put(device, given[name].copy()) for name in names]
    taken = build_kernel_table("cpu")["keep_drafts"](
        *(put(device, a) for a in (rows, proposals.copy(), results.copy(), np.array([limit]))),
        *(vocab_size, *held, post),
    )
    found, drafts, num_drafts = (np.array(device.to_host(t)) for t in (taken, *held[2:]))
    check_box(device, post, found[:, num_results:])
    for row, slot in enumerate(rows.tolist()):
        wanted: list[int] = []
        left = given["room"][slot] - 1 - given["num_computed"][slot] if slot != 5 else 0
        for token in proposals[row].tolist():
            if not 0 <= token < vocab_size or len(wanted) >= min(limit, left):
                break
            wanted.append(token)
        behind = [-2 if token >= vocab_size else -1 for token in proposals[row, len(wanted) :]]
        assert found[row].tolist() == results[row].tolist() + wanted + behind
        assert drafts[slot].tolist() == wanted + [0] * (3 - len(wanted))
        assert num_drafts[slot] == len(wanted)


def test_place_tokens_is_what_a_slow_loop_says(device: CapturingDevice) -> None:
    rng, size = np.random.default_rng(0), 4
    positions, room = rng.integers(0, 24, 40), rng.integers(0, 28, 40)
    tables = rng.integers(1, 99, (40, 7)).astype(np.int32)
    put = CpuDevice.to_device
    found = build_kernel_table("cpu")["place_tokens"](
        *(put(device, array.copy()) for array in (positions, room, tables)), size
    )
    for row, (where, slot, length) in enumerate(
        zip(*(device.to_host(tensor).tolist() for tensor in found), strict=True)
    ):
        position = int(positions[row])
        if position < room[row]:
            place = int(tables[row, position // size]) * size + position % size
            assert (where, slot, length) == (position, place, position + 1)
        else:
            assert (where, slot, length) == (0, -1, 0)


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("has_peaks", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_finish_decode_is_what_a_slow_loop_says(
    device: CapturingDevice, width: int, has_peaks: bool, seed: int
) -> None:
    rng, put = np.random.default_rng(seed), CpuDevice.to_device
    given = state(rng, 6, 4)
    given["drafts"] %= 2
    rows = np.array([3, 0, 5, 2, 5])
    drawn = rng.integers(0, 2, (5, width))
    marked = np.where(rng.random(drawn.shape) < 0.1, -3, drawn)
    peaks = np.where(rng.random(drawn.shape) < 0.1, np.nan, 1.0).astype(np.float32)
    held = {name: put(device, given[name].copy()) for name in ("num_computed", "newest")}
    results, post = put(device, np.full((5, width), -9, np.int64)), a_box(device)
    last = build_kernel_table("cpu")["finish_decode"](
        *(put(device, array) for array in (rows, drawn.reshape(-1), marked.reshape(-1))),
        put(device, peaks.reshape(-1)) if has_peaks else None,
        *(put(device, given[name].copy()) for name in ("drafts", "num_drafts")),
        *(*held.values(), results, post),
    )
    found, computed, newest = (np.array(device.to_host(t)) for t in (results, *held.values()))
    judged = np.minimum(given["num_drafts"][rows], width - 1)
    right = np.array(device.to_host(last)) - np.arange(5) * width
    check_box(device, post, np.column_stack((found, judged, right)))
    if has_peaks:
        marked = np.where(np.isnan(peaks), -2, marked)
    for row, slot in enumerate(rows.tolist()):
        count = 0
        while count < min(given["num_drafts"][slot], width - 1):
            if drawn[row, count] != given["drafts"][slot, count] or marked[row, count + 1] < 0:
                break
            count += 1
        assert int(device.to_host(last)[row]) == row * width + count
        kept = marked[row, : count + 1].tolist()
        assert found[row].tolist() == kept + [-1] * (width - 1 - count)
        if slot != 5:
            assert computed[slot] == given["num_computed"][slot] + 1 + count
            assert newest[slot] == drawn[row, count]
    for slot in set(range(6)) - {0, 2, 3}:
        assert computed[slot] == given["num_computed"][slot]
        assert newest[slot] == given["newest"][slot]


def test_broken_rows_are_marked_and_nan_is_the_worse(device: CapturingDevice) -> None:
    put = CpuDevice.to_device
    nan, inf = np.nan, np.inf
    drawn = put(device, np.array([7, 8, 9, 10]))
    peaks = put(device, np.array([1.0, nan, 2.0, inf], dtype=np.float32))
    possible = put(device, np.array([1.0, nan, -inf, 3.0], dtype=np.float32))
    mark = build_kernel_table("cpu")["mark_broken"]
    assert device.to_host(mark(drawn, peaks, possible)).tolist() == [7, -2, -3, -2]
    assert device.to_host(mark(drawn, peaks, None)).tolist() == [7, -2, 9, -2]


# -- copies ---------------------------------------------------------------------------------------


class LateDevice(CapturingDevice):
    """Copies happen when the queue is drained, as on a device that works on its own."""

    def __init__(self, options: DeviceOptions) -> None:
        super().__init__(options)
        self.queue: list[Callable[[], None]] = []
        self.num_done = self.num_queued = 0

    def upload(self, source: np.ndarray, target: Any) -> None:
        self.queue.append(lambda: CpuDevice.upload(self, source, target))

    def download(self, source: Any, target: np.ndarray) -> None:
        self.queue.append(lambda: CpuDevice.download(self, source, target))

    def record_event(self) -> Any:
        self.num_queued = number = self.num_done + len(self.queue)
        device = self

        class Event:
            def query(self) -> bool:
                if device.num_done < number:
                    device.drain(1)  # time passes while somebody waits
                return device.num_done >= number

        return Event()

    def drain(self, count: int) -> None:
        for _ in range(min(count, len(self.queue))):
            self.queue.pop(0)()
            self.num_done += 1


@pytest.fixture
def late(tensor_library: str) -> LateDevice:
    return LateDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))


def test_an_upload_is_not_overwritten_before_the_device_has_taken_it(late: LateDevice) -> None:
    """The device is ten steps behind; each step's numbers reach it as they were."""
    uploads, rng, kept = Uploads(late), np.random.default_rng(0), []
    for step in range(12):
        arrays = [rng.integers(0, 99, size) for size in (3, 0, 5)]
        tensors = uploads.send(*arrays)

        def keep(tensors: Any = tensors, arrays: Any = arrays) -> None:
            kept.append(([late.xp.to_numpy(t).tolist() for t in tensors], arrays))

        late.queue.append(keep)  # what the step's work reads
        if step % 5 == 4:
            late.drain(3)
    late.drain(99)
    assert len(kept) == 12
    for found, arrays in kept:
        assert found == [array.tolist() for array in arrays]


def test_downloads_share_memory_only_when_it_was_given_back(late: LateDevice) -> None:
    downloads = Downloads(late)
    first = downloads.start([CpuDevice.to_device(late, np.arange(4))])
    floats = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
    second = downloads.start(
        [CpuDevice.to_device(late, np.arange(5) + 50), CpuDevice.to_device(late, floats)]
    )
    late.drain(9)
    assert first.arrays[0].tolist() == [0, 1, 2, 3]
    assert second.arrays[0].tolist() == [50, 51, 52, 53, 54]
    assert second.arrays[1].tolist() == floats.tolist()
    memory = first._memory
    first.release()
    third = downloads.start([CpuDevice.to_device(late, np.arange(2))])
    assert third._memory is memory


# -- failures and memory --------------------------------------------------------------------------


def worker_on(folder: Path, library: str, kind: type[CpuDevice], **settings: Any) -> Worker:
    settings = {"max_num_seqs": 4} | settings
    worker = make_worker(engine_config(folder, library, **settings))
    resolved = OnCapturingDevice(worker.resolved)
    load = resolved.load
    resolved.load = lambda k, name="": kind if k == "device" else load(k, name)  # type: ignore
    worker.resolved = resolved  # type: ignore[assignment]
    return worker


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (RuntimeError("operation not permitted"), WorkerError, "4 rows cannot be captured"),
        (MemoryError(), ResourceError, "memory ran out while a decode step of 4 rows"),
    ],
)
def test_a_captured_graph_that_fails_says_what_to_do(
    folder: Path, tensor_library: str, error: Exception, expected: type[Exception], words: str
) -> None:
    class Refusing(CapturingDevice):
        def capture(self, run: Any, beside: Any = None) -> Any:
            raise error

    worker = worker_on(folder, tensor_library, Refusing)
    worker.load()
    with pytest.raises(expected, match=words) as caught:
        worker.initialize_cache(64, 0)
    assert "--enforce-eager" in str(caught.value)


def test_memory_for_captured_graphs_is_measured_before_the_cache_is_sized(
    folder: Path, tensor_library: str
) -> None:
    """The first captured graph takes much, each further one little; the pool gets what is left."""
    mib = 2**20

    class Metered(CapturingDevice):
        used = 0

        def memory(self) -> MemoryInfo:
            return MemoryInfo(total_bytes=1000 * mib, free_bytes=900 * mib - Metered.used)

        def capture(self, run: Any, beside: Any = None) -> Any:
            Metered.used += mib if beside is not None else 50 * mib
            return super().capture(run, beside)

    Metered.used = 0
    worker = worker_on(
        folder, tensor_library, Metered, cache={"num_blocks_override": None}, max_num_seqs=8
    )
    info = worker.load()
    # 4 sizes; the first has five captured graphs (50 + 4), the others five small ones each.
    assert "- 0.07 GiB for captured decode steps" in info.memory_arithmetic
    assert info.available_bytes <= int(1000 * mib * 0.9) - 100 * mib - (54 + 3 * 5) * mib
    assert worker._profile(0).graph_bytes == 69 * mib
    worker.close()


def test_the_report_and_the_log_say_what_is_captured(
    folder: Path, tensor_library: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = worker_on(folder, tensor_library, CapturingDevice)
    info = worker.load()
    assert "captured decode steps: 3 sizes, 1 to 4 rows" in info.report
    with caplog.at_level(logging.INFO):
        worker.initialize_cache(64, 0)
    assert any("captured 3 graphs: decodes up to 4 rows" in m for m in caplog.messages)
    worker.close()


def test_a_lost_device_is_called_so_although_its_state_cannot_be_cleared(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked of it afterwards fails, too, in words that do not say why."""
    config = dataclasses.replace(engine_config(folder, tensor_library), graphs=GraphConfig())
    worker = make_worker(config)
    worker.resolved = OnCapturingDevice(worker.resolved)  # type: ignore[assignment]
    worker.load()
    steps = Steps(worker)
    steps.add(1, [5, 6, 7])

    def lose(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    def fail() -> None:
        raise RuntimeError("something else failed")

    monkeypatch.setattr(worker._runner.slots, "forget", fail)
    monkeypatch.setattr(worker._runner._model, "forward", lose)
    monkeypatch.setattr(type(worker.device), "is_lost", lambda _, e: "gone" in str(e))
    with pytest.raises(WorkerError, match=r"lost.*the device is gone"):
        steps.launch([steps.row(1)])
    worker.close()


def test_a_device_lost_while_a_step_runs_is_called_so(
    folder: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asynchronous errors show when the result is waited for."""
    worker = make_worker(engine_config(folder, tensor_library))
    worker.load()
    steps = Steps(worker)
    steps.add(1, [5, 6, 7])

    class Event:
        def query(self) -> bool:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(type(worker.device), "record_event", lambda _: Event())
    monkeypatch.setattr(type(worker.device), "is_lost", lambda _, e: "gone" in str(e))
    with pytest.raises(WorkerError, match=r"lost.*the device is gone"):
        steps.launch([steps.row(1)]).wait()
    worker.close()
