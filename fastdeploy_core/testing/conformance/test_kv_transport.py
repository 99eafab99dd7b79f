"""A KV transport between two processes: right bytes, no late bytes, bounded time, no strangers.

This process pulls from a peer process that the tests kill and freeze. A transport that can only
push is not covered yet and skips.
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.kv_transport import (
    CancelResult,
    Region,
    TransferEvent,
    TransferEventKind,
    TransferPlan,
    TransportOptions,
)
from fastdeploy_core.errors import CapabilityError, FastDeployError, InvalidRequest
from fastdeploy_core.testing.peer import RemotePeer, pattern

from .base import MEBIBYTE, Conformance, resident_bytes

BLOCK_BYTES = 8192
NUM_BLOCKS = 96
CANARY = 0xA5


class Side:
    """This process's transport with its region, all canary at first."""

    def __init__(self, driver: Any, options: TransportOptions, **region: Any) -> None:
        settings = {"num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES, "layout_hash": "layout"}
        settings |= region
        shape = (settings["num_blocks"], settings["block_bytes"])
        self.memory = np.full(shape, CANARY, np.uint8)
        self.transport = driver(options)
        self.transport.register(
            [
                Region(
                    1,
                    memoryview(self.memory.reshape(-1)),
                    settings["block_bytes"],
                    settings["layout_hash"],
                )
            ]
        )

    def wait(
        self, done: Callable[[list[TransferEvent]], bool], limit_s: float = 30.0
    ) -> list[TransferEvent]:
        """Poll until `done` holds of all events so far."""
        events: list[TransferEvent] = []
        deadline = time.monotonic() + limit_s
        while not done(events):
            assert time.monotonic() < deadline, f"nothing more within {limit_s:g} s after {events}"
            events += self.transport.poll()
            time.sleep(0.001)
        return events

    def finish(self, *transfer_ids: int, limit_s: float = 30.0) -> dict[int, TransferEvent]:
        """Wait until every transfer has its one last event."""
        last = (TransferEventKind.DONE, TransferEventKind.FAILED)

        def done(events: list[TransferEvent]) -> bool:
            return set(transfer_ids) <= {e.transfer_id for e in events if e.kind in last}

        ends = [e for e in self.wait(done, limit_s) if e.kind in last]
        assert len(ends) == len({e.transfer_id for e in ends}), f"a transfer ended twice: {ends}"
        return {e.transfer_id: e for e in ends}


class KVTransportConformance(Conformance):
    """Every promise of contracts/kv_transport.py that two processes of one host can check."""

    kind = "kv_transport"

    @pytest.fixture(autouse=True)
    def _pulls(self, driver: Any) -> None:
        if not driver.capabilities.read:
            pytest.skip("capabilities.read is False; the kit tests the pulling side")

    @pytest.fixture
    def options(self) -> TransportOptions:
        """Options of both sides."""
        return TransportOptions(
            secret=secrets.token_bytes(32), model_revision="r1", progress_timeout_s=2.0
        )

    @pytest.fixture
    def here(self, driver: Any, options: TransportOptions) -> Iterator[Side]:
        """This process's side."""
        side = Side(driver, options)
        yield side
        side.transport.close()

    @pytest.fixture
    def peer(self, driver: Any, options: TransportOptions) -> Iterator[RemotePeer]:
        """The other process, its blocks filled with `pattern(1)`."""
        remote = RemotePeer(driver.name, options, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)
        yield remote
        remote.close()

    def plan(
        self, transfer_id: int, source: list[int], target: list[int], **more: Any
    ) -> TransferPlan:
        """A pull of our region."""
        settings: dict[str, Any] = {"attempt": 0, "region_id": 1, "deadline_s": 30.0} | more
        return TransferPlan(
            transfer_id=transfer_id, source_blocks=source, target_blocks=target, **settings
        )

    @pytest.mark.parametrize("count", [0, 1, 2, 17, NUM_BLOCKS])
    def test_permuted_blocks_arrive_and_others_stay(
        self, here: Side, peer: RemotePeer, count: int
    ) -> None:
        rng = random.Random(count)  # noqa: S311 - test data
        source, target = (rng.sample(range(NUM_BLOCKS), count) for _ in range(2))
        name = here.transport.connect(peer.descriptor)
        here.transport.submit(name, self.plan(1, source, target))
        event = here.finish(1)[1]
        assert event.kind is TransferEventKind.DONE and event.peer == name
        assert event.num_bytes == count * BLOCK_BYTES
        expected = np.full_like(here.memory, CANARY)
        expected[target] = pattern(1, NUM_BLOCKS, BLOCK_BYTES)[source]
        assert np.array_equal(here.memory, expected)

    def test_one_source_block_may_go_to_many_places(self, here: Side, peer: RemotePeer) -> None:
        name = here.transport.connect(peer.descriptor)
        targets = list(range(0, NUM_BLOCKS, 2))
        here.transport.submit(name, self.plan(1, [7] * len(targets), targets))
        assert here.finish(1)[1].kind is TransferEventKind.DONE
        wanted = pattern(1, NUM_BLOCKS, BLOCK_BYTES)[7]
        assert np.array_equal(here.memory[targets], np.tile(wanted, (len(targets), 1)))
        assert np.all(here.memory[1::2] == CANARY)

    @pytest.mark.parametrize("block_bytes", [1, 100, 4096, 3 * MEBIBYTE + 7])
    def test_odd_block_sizes(
        self, driver: Any, options: TransportOptions, block_bytes: int
    ) -> None:
        size = {"num_blocks": 5, "block_bytes": block_bytes}
        here = Side(driver, options, **size)
        remote = RemotePeer(driver.name, options, num_blocks=5, block_bytes=max(4, block_bytes))
        try:
            if block_bytes < 4:
                with pytest.raises(CapabilityError):
                    here.transport.connect(remote.descriptor)
                return
            name = here.transport.connect(remote.descriptor)
            here.transport.submit(name, self.plan(1, [4, 2, 0], [0, 1, 2]))
            assert here.finish(1)[1].kind is TransferEventKind.DONE
            assert np.array_equal(here.memory[:3], pattern(1, 5, block_bytes)[[4, 2, 0]])
        finally:
            remote.close()
            here.transport.close()

    def test_many_blocks_in_one_transfer(self, driver: Any, options: TransportOptions) -> None:
        size = {"num_blocks": 20000, "block_bytes": 64}
        here = Side(driver, options, **size)
        remote = RemotePeer(driver.name, options, **size)
        try:
            order = np.random.default_rng(0).permutation(20000).tolist()
            name = here.transport.connect(remote.descriptor)
            here.transport.submit(name, self.plan(1, order, list(range(20000))))
            assert here.finish(1)[1].kind is TransferEventKind.DONE
            assert np.array_equal(here.memory, pattern(1, 20000, 64)[order])
        finally:
            remote.close()
            here.transport.close()

    def test_many_transfers_cancelled_in_random_order(self, here: Side, peer: RemotePeer) -> None:
        rng = random.Random(0)  # noqa: S311 - test data
        name = here.transport.connect(peer.descriptor)
        places = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        parts = {i: places[4 * i : 4 * i + 4] for i in range(NUM_BLOCKS // 4)}
        for index, targets in parts.items():
            here.transport.submit(name, self.plan(index + 1, targets[::-1], targets))
        dropped = set(rng.sample(sorted(parts), 8))
        for index in sorted(dropped, key=lambda i: -i):
            assert here.transport.cancel(index + 1) is CancelResult.SAFE
        kept = [i + 1 for i in parts if i not in dropped]
        ends = here.finish(*kept)
        assert {e.kind for e in ends.values()} == {TransferEventKind.DONE}
        assert set(ends) == set(kept), "a cancelled transfer was reported"
        source = pattern(1, NUM_BLOCKS, BLOCK_BYTES)
        for index, targets in parts.items():
            if index not in dropped:
                assert np.array_equal(here.memory[targets], source[targets[::-1]])

    def test_cancelled_transfer_lands_nothing_more(
        self, driver: Any, options: TransportOptions
    ) -> None:
        size = {"num_blocks": 64, "block_bytes": MEBIBYTE}
        here, remote = Side(driver, options, **size), RemotePeer(driver.name, options, **size)
        try:
            name = here.transport.connect(remote.descriptor)
            here.transport.submit(name, self.plan(1, list(range(64)), list(range(64))))
            here.wait(lambda events: bool(np.any(here.memory[0] != CANARY)))
            result = here.transport.cancel(1)
            if result is CancelResult.UNSAFE:
                assert not driver.capabilities.receiver_driven
                deadline = time.monotonic() + 30
                while not here.transport.fence(name):
                    assert time.monotonic() < deadline, "fence() never resolved"
                    time.sleep(0.01)
            here.memory[:] = CANARY  # the blocks belong to somebody else now
            for _ in range(100):
                assert not here.transport.poll()
                time.sleep(0.003)
            assert np.all(here.memory == CANARY), "bytes landed after SAFE or fence()"
            assert here.transport.cancel(1) is CancelResult.SAFE
            assert here.transport.cancel(999) is CancelResult.SAFE
        finally:
            remote.close()
            here.transport.close()

    def test_lost_peer_ends_every_transfer(self, here: Side, peer: RemotePeer) -> None:
        name = here.transport.connect(peer.descriptor)
        here.transport.submit(name, self.plan(1, [1], [1]))
        here.finish(1)
        peer.freeze()  # so that the transfers are under way when it dies
        for index in range(2, 6):
            here.transport.submit(name, self.plan(index, [1, 2, 3], [10, 11, 12]))
        peer.kill()
        ends = here.finish(2, 3, 4, 5, limit_s=10)
        assert {e.kind for e in ends.values()} == {TransferEventKind.FAILED}
        assert all(e.retryable and e.reason for e in ends.values())
        with pytest.raises(FastDeployError):
            # Whether the loss is known already or is found now, the caller hears of it.
            here.transport.submit(name, self.plan(9, [1], [1]))
            if here.finish(9, limit_s=10)[9].kind is TransferEventKind.FAILED:
                raise InvalidRequest("failed, as it must")

    def test_peer_down_is_reported_once(self, here: Side, peer: RemotePeer) -> None:
        name = here.transport.connect(peer.descriptor)
        here.transport.submit(name, self.plan(1, [0], [0]))
        here.finish(1)
        peer.kill()
        down = TransferEventKind.PEER_DOWN
        events = here.wait(lambda found: any(e.kind is down for e in found), 10)
        time.sleep(0.1)
        events += here.transport.poll()
        assert [e.peer for e in events if e.kind is down] == [name]

    def test_frozen_peer_fails_within_the_deadline_and_writes_nothing_later(
        self, here: Side, peer: RemotePeer
    ) -> None:
        name = here.transport.connect(peer.descriptor)
        here.transport.submit(name, self.plan(1, [0], [0]))
        here.finish(1)
        peer.freeze()
        started = time.monotonic()
        here.transport.submit(name, self.plan(2, list(range(32)), list(range(32))))
        here.transport.submit(name, self.plan(3, [1], [40], deadline_s=0.3))
        ends = here.finish(2, 3, limit_s=20)
        assert {e.kind for e in ends.values()} == {TransferEventKind.FAILED}
        assert time.monotonic() - started >= 0.3
        self._fence(here, name)
        here.memory[:] = CANARY
        peer.thaw()
        assert peer.events() is not None  # it lives, and had time to send whatever it had
        time.sleep(0.3)
        here.transport.poll()
        assert np.all(here.memory == CANARY), "a frozen peer's bytes landed after fence()"

    def test_peer_can_be_used_again_after_a_fence(self, here: Side, peer: RemotePeer) -> None:
        name = here.transport.connect(peer.descriptor)
        self._fence(here, name)
        with pytest.raises(FastDeployError):
            here.transport.submit(name, self.plan(1, [3], [4]))
        assert here.transport.connect(peer.descriptor) == name
        here.transport.submit(name, self.plan(2, [3], [4]))
        assert here.finish(2)[2].kind is TransferEventKind.DONE

    def test_newer_attempt_replaces_the_older(self, here: Side, peer: RemotePeer) -> None:
        name = here.transport.connect(peer.descriptor)
        here.transport.submit(name, self.plan(1, [0], [0]))
        here.finish(1)
        peer.freeze()
        here.transport.submit(name, self.plan(2, [1], [1], attempt=4))
        with pytest.raises(FastDeployError):
            here.transport.submit(name, self.plan(2, [1], [1], attempt=4))
        here.transport.submit(name, self.plan(2, [5], [6], attempt=5))
        peer.thaw()
        assert here.finish(2)[2].kind is TransferEventKind.DONE
        expected = np.full_like(here.memory, CANARY)
        expected[[0, 6]] = pattern(1, NUM_BLOCKS, BLOCK_BYTES)[[0, 5]]
        assert np.array_equal(here.memory, expected), "the stale attempt wrote its block"

    def test_notes_follow_the_transfers_before_them(self, here: Side, peer: RemotePeer) -> None:
        name = here.transport.connect(peer.descriptor)
        here.transport.submit(name, self.plan(1, list(range(90)), list(range(90))))
        notes = [b"first", b"", b"\x00" * 4096, b"last"]
        for data in notes:
            here.transport.note(name, data)
        got: list[bytes] = []
        seen: list[TransferEvent] = []
        deadline = time.monotonic() + 30
        while len(got) < len(notes) and time.monotonic() < deadline:
            arrived = [e for e in peer.events() if e["kind"] == "note"]
            seen += here.transport.poll()
            if arrived and not got:
                assert any(e.kind is TransferEventKind.DONE for e in seen), "a note overtook"
            got += [bytes.fromhex(e["note"]) for e in arrived]
        assert got == notes
        with pytest.raises(InvalidRequest):
            here.transport.note(name, b"x" * 4097)
        with pytest.raises(FastDeployError):
            here.transport.note("nobody", b"x")

    def test_peer_can_answer_with_notes(self, here: Side, peer: RemotePeer) -> None:
        here.transport.connect(peer.descriptor)
        answer = peer.ask(do="connect", descriptor=here.transport.descriptor().hex())
        assert "error" not in peer.ask(do="note", peer=answer["peer"], data=b"hi".hex())
        note = TransferEventKind.NOTE
        events = here.wait(lambda found: any(e.kind is note for e in found))
        assert [e.note for e in events if e.kind is note] == [b"hi"]

    def test_bad_plans_are_refused_before_a_byte_moves(self, here: Side, peer: RemotePeer) -> None:
        name = here.transport.connect(peer.descriptor)
        bad = [
            self.plan(1, [NUM_BLOCKS], [0]),
            self.plan(1, [0], [NUM_BLOCKS]),
            self.plan(1, [-1], [0]),
            self.plan(1, [0], [-1]),
            self.plan(1, [2**70], [0]),
            self.plan(1, [0, 1], [0]),
            self.plan(1, [0], [0], region_id=9),
        ]
        for plan in bad:
            with pytest.raises(InvalidRequest):
                here.transport.submit(name, plan)
        with pytest.raises(FastDeployError):
            here.transport.submit("nobody", self.plan(1, [0], [0]))
        time.sleep(0.05)
        assert np.all(here.memory == CANARY)
        assert not [e for e in here.transport.poll() if e.transfer_id]

    def test_malformed_descriptors_are_refused(self, here: Side, peer: RemotePeer) -> None:
        good = peer.descriptor
        rng = random.Random(0)  # noqa: S311 - test data
        bad = [b"", b"\x00", b"\xff" * 40, good[:-1], good + b"\x00", b"\x80\x04N.", b"{}"]
        bad += [b"\xdd\xff\xff\xff\xff" + good, b"\x81" * 5000, b"\xc1" * (1 << 20)]
        bad += [rng.randbytes(rng.randrange(1, 200)) for _ in range(200)]
        for data in bad:
            with pytest.raises((InvalidRequest, CapabilityError)):
                here.transport.connect(data)
        assert here.transport.connect(good)

    @pytest.mark.parametrize("what", ["layout", "block size", "model revision"])
    def test_unlike_peers_are_refused(
        self, driver: Any, options: TransportOptions, peer: RemotePeer, what: str
    ) -> None:
        region = {"layout": {"layout_hash": "other"}, "block size": {"block_bytes": 4096}}
        own = options
        if what == "model revision":
            own = TransportOptions(secret=options.secret, model_revision="r2")
        side = Side(driver, own, **region.get(what, {}))
        with pytest.raises(CapabilityError):
            side.transport.connect(peer.descriptor)
        side.transport.close()

    def test_wrong_secret_gets_nothing(
        self, driver: Any, options: TransportOptions, peer: RemotePeer
    ) -> None:
        other = TransportOptions(
            secret=secrets.token_bytes(32), model_revision="r1", progress_timeout_s=2.0
        )
        side = Side(driver, other)
        name = side.transport.connect(peer.descriptor)
        side.transport.submit(name, self.plan(1, [0], [0]))
        assert side.finish(1, limit_s=10)[1].kind is TransferEventKind.FAILED
        assert np.all(side.memory == CANARY), "a stranger read the peer's memory"
        side.transport.close()
        good = Side(driver, options)
        name = good.transport.connect(peer.descriptor)
        good.transport.submit(name, self.plan(1, [0], [0]))
        assert good.finish(1)[1].kind is TransferEventKind.DONE, "the stranger did harm"
        good.transport.close()

    def test_descriptor_carries_no_secret(self, here: Side, options: TransportOptions) -> None:
        data = here.transport.descriptor()
        assert len(data) <= options.max_descriptor_bytes
        assert options.secret not in data and options.secret.hex().encode() not in data

    def test_restarted_peer_is_another_one(
        self, driver: Any, options: TransportOptions, here: Side, peer: RemotePeer
    ) -> None:
        old = peer.descriptor
        first = here.transport.connect(old)
        peer.kill()
        again = RemotePeer(driver.name, options, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)
        try:
            here.wait(lambda found: bool(found), 10)
            second = here.transport.connect(again.descriptor)
            assert second != first
            here.transport.submit(second, self.plan(2, [8], [9]))
            assert here.finish(2)[2].kind is TransferEventKind.DONE
            here.transport.connect(old)
            down = TransferEventKind.PEER_DOWN
            here.wait(lambda found: any(e.kind is down and e.peer == first for e in found), 20)
        finally:
            again.close()

    def test_peers_source_is_never_written(self, here: Side, peer: RemotePeer) -> None:
        before = pattern(1, NUM_BLOCKS, BLOCK_BYTES).tobytes()[:BLOCK_BYTES]
        name = here.transport.connect(peer.descriptor)
        here.transport.submit(name, self.plan(1, list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS))))
        here.finish(1)
        assert bytes.fromhex(peer.ask(do="memory", num_bytes=BLOCK_BYTES)["memory"]) == before

    def test_fileno_is_readable_when_poll_has_something(self, here: Side, peer: RemotePeer) -> None:
        number = here.transport.fileno()
        if number < 0:
            pytest.skip("fileno() is -1: only polling works")
        here.transport.poll()
        assert not select.select([number], [], [], 0)[0]
        name = here.transport.connect(peer.descriptor)
        here.transport.submit(name, self.plan(1, [0], [0]))
        assert select.select([number], [], [], 30)[0], "no wake-up within 30 s"
        here.finish(1)

    def test_poll_respects_its_limit(self, here: Side, peer: RemotePeer) -> None:
        name = here.transport.connect(peer.descriptor)
        for index in range(1, 6):
            here.transport.submit(name, self.plan(index, [], []))
        events: list[TransferEvent] = []
        deadline = time.monotonic() + 30
        while len(events) < 5 and time.monotonic() < deadline:
            part = here.transport.poll(limit=2)
            assert len(part) <= 2
            events += part
        assert sorted(e.transfer_id for e in events) == [1, 2, 3, 4, 5]

    def test_close_gives_everything_back(self, driver: Any, options: TransportOptions) -> None:
        def cycle() -> None:
            one, two = Side(driver, options), Side(driver, options)
            name = one.transport.connect(two.transport.descriptor())
            one.transport.submit(name, self.plan(1, list(range(9)), list(range(9))))
            one.finish(1)
            for side in (one, two, one):  # twice is once
                side.transport.close()

        for _ in range(5):
            cycle()
        gc.collect()
        before = (self._open_files(), threading.active_count(), resident_bytes())
        for _ in range(100):
            cycle()
        gc.collect()
        assert self._open_files() <= before[0], "files stay open"
        assert threading.active_count() <= before[1], "threads stay behind"
        grown = resident_bytes() - before[2]
        assert grown <= 24 * MEBIBYTE, f"{grown / MEBIBYTE:.1f} MiB more after 100 cycles"

    def test_closed_transport_says_so(self, driver: Any, options: TransportOptions) -> None:
        side = Side(driver, options)
        side.transport.close()
        with pytest.raises(FastDeployError):
            side.transport.descriptor()

    def _fence(self, side: Side, name: str) -> None:
        deadline = time.monotonic() + 30
        while not side.transport.fence(name):
            assert time.monotonic() < deadline, "fence() never resolved"
            time.sleep(0.01)

    def _open_files(self) -> int:
        if not Path("/proc/self/fd").is_dir():
            return 0
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - no Path objects wanted


class TestKVTransport(KVTransportConformance):
    """Run by `fastdeploy plugins check`."""
