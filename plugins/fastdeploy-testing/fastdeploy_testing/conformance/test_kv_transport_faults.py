"""A KV transport when things go wrong: lost and frozen peers, cancelled transfers, unknown
processes.

All tests ask: can a byte be written to a block after its owner was told that none can?
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
import time
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.kv_transport import (
    CancelResult,
    TransferEventKind,
    TransportOptions,
)
from fastdeploy_core.errors import CapabilityError, FastDeployError, InvalidRequest
from fastdeploy_testing.peer import RemotePeer, pattern

from .base import MEBIBYTE
from .kv_side import BLOCK_BYTES, CANARY, NUM_BLOCKS, KVTransportSuite, Side


class KVTransportFaultsConformance(KVTransportSuite):
    """The peer process is killed, frozen, restarted, or knows another secret."""

    def test_cancelled_transfer_lands_nothing_more(
        self, driver: Any, options: TransportOptions
    ) -> None:
        size: dict[str, Any] = {"num_blocks": 64, "block_bytes": MEBIBYTE}
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
            here.memory[:] = CANARY  # another sequence owns the blocks now
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
            # The caller hears of the loss, whether it was known before or is found now.
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
        self.fence(here, name)
        here.memory[:] = CANARY
        peer.thaw()
        assert peer.events() is not None  # it lives, and had time to send whatever it had
        time.sleep(0.3)
        here.transport.poll()
        assert np.all(here.memory == CANARY), "a frozen peer's bytes landed after fence()"

    def test_a_transfer_ends_at_its_own_deadline(
        self, driver: Any, options: TransportOptions
    ) -> None:
        """However long a peer may stand still."""
        patient = dataclasses.replace(options, progress_timeout_s=60.0)
        size: dict[str, Any] = {"num_blocks": 4, "block_bytes": BLOCK_BYTES}
        here, remote = Side(driver, patient, **size), RemotePeer(driver.name, patient, **size)
        try:
            name = here.transport.connect(remote.descriptor)
            here.transport.submit(name, self.plan(1, [0], [0]))
            here.finish(1)
            remote.freeze()
            here.transport.submit(name, self.plan(2, [1], [1], deadline_s=0.5))
            assert here.finish(2, limit_s=20)[2].kind is TransferEventKind.FAILED
        finally:
            remote.close()
            here.transport.close()

    def test_peer_can_be_used_again_after_a_fence(self, here: Side, peer: RemotePeer) -> None:
        name = here.transport.connect(peer.descriptor)
        self.fence(here, name)
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
        expected = np.full(here.memory.shape, CANARY, np.uint8)
        expected[[0, 6]] = pattern(1, NUM_BLOCKS, BLOCK_BYTES)[[0, 5]]
        assert np.array_equal(here.memory, expected), "the stale attempt wrote its block"

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
        region: dict[str, dict[str, Any]] = {
            "layout": {"layout_hash": "other"},
            "block size": {"block_bytes": 4096},
        }
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
        with contextlib.suppress(FastDeployError):  # the peer may have said no already
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


class TestKVTransportFaults(KVTransportFaultsConformance):
    """Run by `fastdeploy plugins check`."""
