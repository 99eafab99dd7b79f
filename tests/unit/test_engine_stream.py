"""Output streams of slow and leaving clients, and what crosses the wire."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.engine import stream as stream_module
from fastdeploy_core.engine.processes import wire
from fastdeploy_core.engine.processes.progress import Progress
from fastdeploy_core.engine.stream import OutputStream
from fastdeploy_core.errors import FastDeployError, QueueFull, RequestTimeout, WorkerError
from fastdeploy_core.types import (
    BatchRows,
    DraftStats,
    FinishReason,
    RequestOutputDelta,
    SchedulerOutput,
    SequenceDelta,
    TokenLogprobs,
)
from tests.null_engine import make_config, make_request


def delta(position, tokens=(1,), *, index=0, finish=None, **fields):
    return RequestOutputDelta(
        request_id="r",
        position=position,
        sequences=[SequenceDelta(index=index, token_ids=list(tokens), finish_reason=finish)],
        **fields,
    )


def collect(stream):
    async def main():
        deltas = []
        while True:
            deltas.append(await asyncio.wait_for(stream.get(), 5))
            if deltas[-1].finished:
                return deltas

    return asyncio.run(main())


def test_a_delta_waits_for_so_many_tokens_but_for_the_first_and_the_last():
    stream = OutputStream(make_request("r", [5]), 3)
    sizes = []
    for position in range(9):
        if position in (3, 4, 7):
            assert stream.put_tokens(position, [position])
        else:
            assert stream.put(delta(position, [position], finished=position == 8))
        if stream.is_due():
            sizes.append(asyncio.run(stream.get()).sequences[0].token_ids)
    assert sizes == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]


def test_several_deltas_that_come_as_one_take_as_many_positions():
    stream = OutputStream(make_request("r", [5]))
    stream.put(delta(0))
    stream.put_tokens(1, [1, 2, 3], 3)  # something waits
    assert asyncio.run(stream.get()).sequences[0].token_ids == [1, 1, 2, 3]
    stream.put_tokens(4, [4, 5], 2)  # nothing does
    stream.put_tokens(6, [6])
    assert asyncio.run(stream.get()).sequences[0].token_ids == [4, 5, 6]
    stream.put_tokens(9, [9])
    with pytest.raises(WorkerError, match="lost between deltas 7 and 9"):
        asyncio.run(stream.get())


def test_what_waits_is_given_out_before_an_error_and_when_a_branch_ends():
    stream = OutputStream(make_request("r", [5], n=2, temperature=1.0), 50)
    stream.put(delta(0))
    assert asyncio.run(stream.get()).position == 0
    stream.put(delta(1, [4]))
    assert not stream.is_due()
    stream.put(delta(2, [6], index=1, finish=FinishReason.STOP))
    ended = asyncio.run(stream.get())
    assert {seq.index: seq.token_ids for seq in ended.sequences} == {0: [4], 1: [6]}
    stream.put(delta(3, [8]))
    assert not stream.is_due()
    stream.fail(WorkerError("gone"))
    assert asyncio.run(stream.get()).sequences[0].token_ids == [8]
    with pytest.raises(WorkerError, match="gone"):
        asyncio.run(stream.get())


def test_a_reader_that_waits_for_a_chunk_wakes_when_it_is_whole():
    async def main():
        stream = OutputStream(make_request("r", [5]), 3)
        stream.put(delta(0))
        await stream.get()
        reader = asyncio.create_task(stream.get())
        for position in (1, 2):
            await asyncio.sleep(0)
            stream.put_tokens(position, [position])
            await asyncio.sleep(0)
            assert not reader.done()
        stream.put_tokens(3, [3])
        return (await asyncio.wait_for(reader, 60)).sequences[0].token_ids

    assert asyncio.run(main()) == [1, 2, 3]


def test_slow_reader_gets_everything_in_one_delta():
    stream = OutputStream(make_request("r", [5], n=2, temperature=1.0))
    logprobs = [TokenLogprobs([7], [-1.0], 1)]
    first = delta(0, [1], num_cached_tokens=3)
    second = delta(1, [7], index=1)
    second.sequences[0].logprobs = logprobs
    third = delta(2, [9], index=1, finish=FinishReason.STOP)
    third.sequences[0].logprobs = logprobs
    for part in (first, second, third, delta(3, [2, 3], finish=FinishReason.LENGTH, finished=True)):
        assert stream.put(part)
    (merged,) = collect(stream)
    assert merged.num_cached_tokens == 3 and merged.position == 0
    by_index = {seq.index: seq for seq in merged.sequences}
    assert by_index[0].token_ids == [1, 2, 3] and by_index[0].finish_reason is FinishReason.LENGTH
    assert by_index[1].token_ids == [7, 9] and by_index[1].logprobs == logprobs * 2
    assert by_index[1].finish_reason is FinishReason.STOP


# A value of every field that a delta may bring; a new field has to be added and to survive.
SAID_OF_SEQUENCE = {
    "index": 0,
    "token_ids": [6],
    "logprobs": [TokenLogprobs([6], [-1.0], 1)],
    "finish_reason": FinishReason.STOP,
    "stop_reason": 0,
    "drafts": DraftStats(3, 9, [2, 1, 0]),
    "pooled": b"\0\0\x80?",
}
SAID_OF_REQUEST = {
    "prompt_logprobs": [None],
    "num_cached_tokens": 0,
    "queue_s": 0.0,
    "finished": True,
    "error": "what happened",
    "error_type": "QueueFull",
}


@pytest.mark.parametrize("name", SequenceDelta.__struct_fields__)
def test_what_a_delta_says_of_a_sequence_survives_merging(name):
    for is_first in (True, False):
        stream = OutputStream(make_request("r", [5]))
        said, plain = SequenceDelta(**{name: SAID_OF_SEQUENCE[name]}), SequenceDelta()
        for position, seq in enumerate([said, plain] if is_first else [plain, said]):
            stream.put(RequestOutputDelta(request_id="r", position=position, sequences=[seq]))
        (merged,) = asyncio.run(stream.get()).sequences
        assert getattr(merged, name) == SAID_OF_SEQUENCE[name]


# These are the same in all deltas of a stream, the stream's own, or tested above.
OTHERS = {"request_id", "attempt", "position", "sequences"}


@pytest.mark.parametrize("name", sorted({*RequestOutputDelta.__struct_fields__} - OTHERS))
def test_what_a_delta_says_of_a_request_survives_merging(name):
    stream = OutputStream(make_request("r", [5]))
    stream.put(delta(0))
    stream.put(delta(1, **{name: SAID_OF_REQUEST[name]}))
    assert getattr(stream._waiting, name) == SAID_OF_REQUEST[name]


def test_repeat_is_dropped_and_a_gap_ends_the_stream():
    stream = OutputStream(make_request("r", [5]))
    stream.put(delta(0, [1]))
    stream.put(delta(0, [1]))
    stream.put(delta(2, [3]))
    with pytest.raises(WorkerError, match="lost between deltas 1 and 2"):
        collect(stream)


def test_tokens_before_an_error_are_delivered_and_are_no_end():
    stream = OutputStream(make_request("r", [5]))
    stream.put(delta(0, [1, 2]))
    failed = {"error": "full", "error_type": "QueueFull", "finished": True}
    stream.put(delta(1, [], finish=FinishReason.ERROR, **failed))

    async def main():
        before = await stream.get()
        assert before.sequences[0].token_ids == [1, 2]
        assert before.sequences[0].finish_reason is None
        assert not before.finished
        with pytest.raises(QueueFull, match="full"):
            await stream.get()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["", "NoSuchError", "TYPE_CHECKING", "annotations"])
def test_unknown_error_class_is_the_common_one(name):
    stream = OutputStream(make_request("r", [5]))
    stream.put(delta(0, [], error="what happened", error_type=name, finished=True))
    with pytest.raises(FastDeployError, match="what happened"):
        collect(stream)


def test_reader_that_never_reads_loses_its_request_after_a_while(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(stream_module.time, "monotonic", lambda: now[0])
    stream = OutputStream(make_request("r", [5]))
    many = list(range(10_000))
    assert stream.put(delta(0, many))
    now[0] = 29.0
    assert stream.put(delta(1, many))
    now[0] = 31.0
    assert not stream.put(delta(2, many))
    with pytest.raises(RequestTimeout, match="did not read"):
        collect(stream)


def test_reader_that_catches_up_is_forgiven(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(stream_module.time, "monotonic", lambda: now[0])
    stream = OutputStream(make_request("r", [5]))
    many = list(range(10_000))
    for position in range(4):
        now[0] += 20.0
        assert stream.put(delta(position, many))
        asyncio.run(stream.get())


def test_configuration_survives_the_wire():
    config = make_config(faults=({"kind": "raise"},), num_drafts=2)
    sent = wire.encode(config)
    assert wire.decoder(EngineConfig).decode(sent) == config


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80\x04K\x01.", b"\xc7\x01\x05x", b"\x93\x01\x02\x03", b"\x81\xa4type\xa3\x80ut"],
)
def test_unreadable_bytes_are_a_clean_error(data):
    for kind in (wire.ToEngine, wire.FromEngine, wire.FromWorker, SchedulerOutput):
        with pytest.raises(wire.UNREADABLE):
            wire.decoder(kind).decode(data)


def test_a_step_message_crosses_the_wire_with_its_columns():
    rows = BatchRows.of([5, 9], [3, 0], [3, 8], [True, False], [2, 0])
    sent = SchedulerOutput(step_id=4, rows=rows, new_block_ids={1: [2, 3]})
    step = wire.decoder(SchedulerOutput).decode(wire.encode(sent))
    for name in rows.__struct_fields__:
        column, expected = getattr(step.rows, name), getattr(rows, name)
        assert type(column) is type(expected) and np.array_equal(column, expected)
        assert column.dtype == expected.dtype
    assert step.new_block_ids == {1: [2, 3]}
    goes_on = wire.decoder(SchedulerOutput).decode(wire.encode(SchedulerOutput(step_id=5)))
    assert goes_on.rows is None


@pytest.mark.parametrize(
    "column", [["object", [1], b"12345678"], ["int64", [2], b"12345678"], ["int64"], 7]
)
def test_columns_that_are_none_are_a_clean_error(column):
    fields = dict.fromkeys(BatchRows.__struct_fields__, column)
    data = msgspec.msgpack.encode({"step_id": 1, "rows": fields})
    with pytest.raises(msgspec.ValidationError):
        wire.decoder(SchedulerOutput).decode(data)


def test_progress_is_seen_from_another_mapping(tmp_path):
    reader = Progress(tmp_path, create=True)
    writer = Progress(tmp_path)
    assert reader.count == 0 and reader.age_s == 0.0
    writer.mark()
    writer.mark()
    assert reader.count == 2 and 0 <= reader.age_s < 60
    for end in (reader, writer):
        end.close()
    with pytest.raises(ValueError):
        assert reader.age_s


def test_progress_is_never_seen_half_written(tmp_path):
    """Who reads while the engine marks must not take it for one that stands still."""
    reader = Progress(tmp_path, create=True)
    mark_for_ever = (
        "import sys\nfrom fastdeploy_core.engine.processes.progress import Progress\n"
        "progress = Progress(sys.argv[1])\nwhile True: progress.mark()"
    )
    writer = subprocess.Popen([sys.executable, "-c", mark_for_ever, str(tmp_path)])
    try:
        deadline = time.monotonic() + 120
        while not reader.count and time.monotonic() < deadline:
            time.sleep(0.01)
        first = reader.count
        ages, counts = [], [first]
        while counts[-1] < first + 200_000 and time.monotonic() < deadline:
            ages.append(reader.age_s)
            counts.append(reader.count)
        assert max(ages) < 30 and counts == sorted(counts) and counts[-1] > first > 0
    finally:
        writer.kill()
        writer.wait()
        reader.close()
