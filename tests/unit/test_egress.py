"""What several front ends asked for comes back to the one that asked, whole and in order; tokens of
short steps together where that spares the processors."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from random import Random

import pytest
import zmq

from fastdeploy_core.engine.processes import egress, wire
from fastdeploy_core.engine.processes.egress import Egress, Output, Routes
from fastdeploy_core.engine.stream import OutputStream
from fastdeploy_core.types import (
    FinishReason,
    RequestOutputDelta,
    SequenceDelta,
    TokenDeltas,
    each_delta,
)
from tests.null_engine import make_request


def delta(name: str, position: int, token: int, *, finished: bool = False) -> RequestOutputDelta:
    reason = FinishReason.STOP if finished else None
    sequence = SequenceDelta(token_ids=[token], finish_reason=reason)
    return RequestOutputDelta(
        request_id=name, position=position, sequences=[sequence], finished=finished
    )


def single(name: str, position: int, *, finished: bool = False) -> RequestOutputDelta:
    return RequestOutputDelta(request_id=name, position=position, finished=finished)


@pytest.mark.parametrize("num_front_ends", [1, 2, 5])
def test_every_delta_reaches_its_front_end_in_order(num_front_ends: int) -> None:
    random, routes = Random(num_front_ends), Routes(num_front_ends)
    owners = {f"r{i}": random.randrange(num_front_ends) for i in range(30)}
    for name, owner in owners.items():
        routes.add(name, owner)
    positions = dict.fromkeys(owners, 0)
    alive = list(owners)
    got: dict[str, list[int]] = {name: [] for name in owners}
    steady = list(alive)
    for _ in range(60):
        if random.random() < 0.3:
            steady = [name for name in alive if random.random() < 0.8]
        outputs: list[RequestOutputDelta | TokenDeltas] = []
        chosen = [positions[name] for name in steady]
        outputs.append(TokenDeltas(steady, chosen, [1] * len(steady), chosen))
        for name in steady:
            positions[name] += 1
        if len(alive) > 5 and random.random() < 0.4:
            ended = random.choice(alive)
            outputs.append(single(ended, positions[ended], finished=True))
            alive.remove(ended)
            steady = [name for name in steady if name != ended]
        for front_end, part in routes.sort(outputs):
            for delta in each_delta(part):
                assert owners[delta.request_id] == front_end
                got[delta.request_id].append(delta.position)
                for sequence in delta.sequences:
                    assert sequence.token_ids == [delta.position]
    for name, found in got.items():
        assert found == list(range(len(found)))
        assert len(found) == positions[name] + (name not in alive)


def test_what_a_dead_front_end_asked_for_is_found_and_forgotten() -> None:
    routes = Routes(2)
    for name, owner in (("a", 0), ("b", 1), ("c", 1), ("d", 1)):
        routes.add(name, owner)
    assert dict(routes.sort([single("d", 0, finished=True)])).keys() == {1}
    routes.remove("c")
    assert routes.remove_all(1) == ["b"]
    assert routes.remove_all(1) == []
    columns = TokenDeltas(["a", "b"], [0, 0], [1, 1], [5, 6])
    ((owner, (part,)),) = routes.sort([columns, single("b", 1)])
    assert owner == 0 and part == TokenDeltas(["a"], [0], [1], [5])
    several = TokenDeltas(["b", "a"], [0, 0], [1, 1], [5, 6, 7, 8], [1, 3])
    ((owner, (part,)),) = routes.sort([several])
    assert owner == 0 and part == TokenDeltas(["a"], [0], [1], [6, 7, 8], [3])


def test_tokens_of_the_same_requests_are_one_entry_each() -> None:
    names, others = ["a", "b"], ["a", "b"]
    first = TokenDeltas(names, [3, 8], [1, 2], [5, 6])
    second = TokenDeltas(names, [4, 9], [1, 2], [7, 8, 9], [1, 2])
    begun, behind = single("c", 0), TokenDeltas(others, [5, 10], [1, 2], [1, 2])
    together, *rest = egress.joined([first, second, begun, behind])
    assert together == TokenDeltas(names, [3, 8], [1, 2], [5, 7, 6, 8, 9], [2, 3], 2)
    assert rest == [begun, behind]
    routes = Routes(2)
    routes.add("b", 1)
    ((_, (part,)),) = routes.sort([together])
    assert part == TokenDeltas(["b"], [8], [2], [6, 8, 9], [3], 2)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_gathers_and_is_joined_every_stream_gets_all_of_it_in_order(seed: int) -> None:
    random = Random(seed)
    made: dict[str, list[int]] = {}
    positions: dict[str, int] = {}
    streams: dict[str, OutputStream] = {}
    got: dict[str, list[int]] = {}
    running: list[str] = []
    waiting: list[Output] = []
    while len(made) < 12 or running:
        outputs: list[Output] = []
        for _ in range(random.randrange(4)):  # steps since the last look
            if len(made) < 12 and random.random() < 0.5:
                name = f"r{len(made)}"
                made[name], got[name] = [0], []
                streams[name], positions[name] = OutputStream(make_request(name, [5])), 1
                outputs.append(delta(name, 0, 0))
                running = [*running, name]
            elif running and random.random() < 0.2:
                name = random.choice(running)
                outputs.append(delta(name, positions[name], 99, finished=True))
                made[name].append(99)
                running = [other for other in running if other != name]
            elif running:
                counts = [random.randrange(1, 4) for _ in running]
                tokens = [random.randrange(90) for _ in range(sum(counts))]
                given = TokenDeltas(
                    running,
                    [positions[name] for name in running],
                    [1] * len(running),
                    tokens,
                    counts,
                )
                for name, piece in zip(running, given.pieces(), strict=True):
                    made[name] += piece
                    positions[name] += 1
                outputs.append(given)
        waiting += outputs
        if running and random.random() < 0.6:  # a rest
            continue
        sent, waiting = egress.joined(waiting), []
        for output in sent:
            if isinstance(output, TokenDeltas):
                columns = zip(output.request_ids, output.positions, output.pieces(), strict=True)
                for name, position, piece in columns:
                    assert streams[name].put_tokens(position, piece, output.num_deltas)
            else:
                streams[output.request_id].put(output)
        for name, stream in streams.items():
            if stream.is_due():
                for sequence in asyncio.run(stream.get()).sequences:
                    got[name] += sequence.token_ids
    assert not waiting and got == made
    assert all(stream.is_ended for stream in streams.values())


class Engine:
    """Results that an egress asks for, and what it sends, with the moment of each."""

    def __init__(self, *, is_resting: bool) -> None:
        self._results: queue.SimpleQueue[RequestOutputDelta | TokenDeltas] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._front_end = self._context.socket(zmq.PULL)
        self._front_end.bind("inproc://front")
        self.egress = Egress(self._context, ["inproc://front"], self._get, is_resting)
        self.egress.start()

    def put(self, *outputs: RequestOutputDelta | TokenDeltas) -> None:
        for output in outputs:
            self._results.put(output)

    def make(self, *outputs: RequestOutputDelta | TokenDeltas) -> None:
        """As an engine does it."""
        self.put(*outputs)
        self.egress.note(outputs)

    def receive(self) -> list[int]:
        """Positions in the next message."""
        assert self._front_end.poll(5000), "nothing was sent"
        message = wire.decoder(wire.FromEngine).decode(self._front_end.recv())
        return [delta.position for delta in each_delta(message.deltas)]

    def is_quiet(self) -> bool:
        """Whether nothing is sent for a while."""
        return not self._front_end.poll(100)

    def close(self) -> None:
        self.egress.stop(5.0)
        self._context.destroy(linger=0)

    def _get(self, may_wait: bool) -> list[RequestOutputDelta | TokenDeltas]:
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._results.get(timeout=0.01 if may_wait else 0))
            while True:
                found.append(self._results.get_nowait())
        return found


def tokens(position: int, rows: int = 1) -> TokenDeltas:
    return TokenDeltas([f"r{i}" for i in range(rows)], [position] * rows, [1] * rows, [7] * rows)


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than anything here waits."""
    monkeypatch.setattr(egress, "MAX_REST_S", 60.0)
    monkeypatch.setattr(egress, "REST_PER_CHUNK_S", 60.0)


@pytest.mark.usefixtures("long_rests")
def test_without_rests_everything_leaves_at_once() -> None:
    engine = Engine(is_resting=False)
    for position in range(3):
        engine.put(tokens(position))
        assert engine.receive() == [position]
    engine.close()


@pytest.mark.usefixtures("long_rests")
def test_tokens_gather_during_a_rest_which_ends_with_the_thread() -> None:
    engine = Engine(is_resting=True)
    engine.put(tokens(0))
    assert engine.receive() == [0]
    engine.put(tokens(1), single("r0", 2, finished=True))
    assert engine.is_quiet()
    engine.egress.stop(5.0)
    assert engine.receive() == [1, 2]
    engine.close()


@pytest.mark.usefixtures("long_rests")
def test_a_rest_ends_when_a_quarter_of_its_streams_begins_or_ends() -> None:
    engine = Engine(is_resting=True)
    engine.make(tokens(0, 8))
    assert engine.receive() == [0] * 8
    engine.make(tokens(1, 8), single("r0", 2, finished=True), single("r1", 2))
    assert engine.is_quiet()
    engine.make(single("new", 0))
    assert engine.receive() == [1] * 8 + [2, 2, 0]
    engine.make(tokens(2, 6))
    assert engine.is_quiet()
    engine.egress.stop(5.0)
    assert engine.receive() == [2] * 6
    engine.close()


@pytest.mark.usefixtures("long_rests")
def test_one_stream_gets_its_first_and_its_last_tokens_at_once() -> None:
    engine = Engine(is_resting=True)
    engine.make(single("r0", 0))
    assert engine.receive() == [0]
    engine.make(tokens(1), single("r0", 2, finished=True))
    assert engine.receive() == [1, 2]
    engine.make(single("r1", 0))
    assert engine.receive() == [0]
    engine.egress.stop(5.0)
    engine.close()


def test_a_rest_is_longer_for_more_streams_up_to_a_limit() -> None:
    assert egress.num_streams([single("a", 0)]) == 1
    several = [tokens(0, 8), tokens(1, 8), single("r0", 2), single("b", 0)]
    assert egress.num_streams(several) == 9
    assert egress.rest_after(9) == 9 * egress.REST_PER_CHUNK_S
    assert egress.rest_after(500) == egress.MAX_REST_S
