"""A KV transport between two processes: right bytes in the right blocks, and nothing else.

This process pulls from a peer process. A transport that can only push skips.
"""

from __future__ import annotations

import gc
import os
import random
import select
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.kv_transport import (
    CancelResult,
    DeviceMemory,
    Region,
    TransferEvent,
    TransferEventKind,
    TransportOptions,
)
from fastdeploy_core.errors import CapabilityError, FastDeployError, InvalidRequest
from fastdeploy_testing.peer import RemotePeer, pattern

from .base import MEBIBYTE, resident_bytes
from .kv_side import BLOCK_BYTES, CANARY, NUM_BLOCKS, KVTransportSuite, Side


class KVTransportConformance(KVTransportSuite):
    """Transfers, notes, refusals and clean ends between two healthy processes."""

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
        expected = np.full(here.memory.shape, CANARY, np.uint8)
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
        size: dict[str, Any] = {"num_blocks": 5, "block_bytes": block_bytes}
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
        size: dict[str, Any] = {"num_blocks": 20000, "block_bytes": 64}
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
            self.plan(1, [0], [0], region_ids=(9,)),
        ]
        for plan in bad:
            with pytest.raises(InvalidRequest):
                here.transport.submit(name, plan)
        with pytest.raises(FastDeployError):
            here.transport.submit("nobody", self.plan(1, [0], [0]))
        time.sleep(0.05)
        assert np.all(here.memory == CANARY)
        assert not [e for e in here.transport.poll() if e.transfer_id]

    def test_what_it_does_not_declare_is_refused(self, here: Side, peer: RemotePeer) -> None:
        can = here.transport.capabilities
        name = here.transport.connect(peer.descriptor)
        if can.max_regions == 1:
            with pytest.raises(CapabilityError):
                here.transport.submit(name, self.plan(1, [0], [0], region_ids=(1, 2)))
        if not can.device_memory:
            memory = DeviceMemory("chip:0", 0, NUM_BLOCKS * BLOCK_BYTES)
            with pytest.raises(CapabilityError):
                here.transport.register([Region(7, memory, BLOCK_BYTES, "layout")])
        assert not [e for e in here.transport.poll() if e.transfer_id]

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
            for side in (one, two, one):  # a second call has no effect
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

    def _open_files(self) -> int:
        if not Path("/proc/self/fd").is_dir():
            return 0
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - no Path objects wanted


class TestKVTransport(KVTransportConformance):
    """Run by `fastdeploy plugins check`."""
