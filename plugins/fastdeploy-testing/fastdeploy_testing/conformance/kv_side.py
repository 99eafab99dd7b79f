"""What both suites of KV transports share: this process's side, and the peer process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.kv_transport import (
    Region,
    TransferEvent,
    TransferEventKind,
    TransferPlan,
    TransportOptions,
)
from fastdeploy_testing.peer import RemotePeer

from .base import Conformance
from .kv_memory import place

BLOCK_BYTES = 8192
NUM_BLOCKS = 96
CANARY = 0xA5


class Side:
    """This process's transport with its region, which holds canaries at first."""

    def __init__(
        self,
        driver: Any,
        options: TransportOptions,
        num_blocks: int = NUM_BLOCKS,
        block_bytes: int = BLOCK_BYTES,
        layout_hash: str = "layout",
    ) -> None:
        canaries = np.full((num_blocks, block_bytes), CANARY, np.uint8)
        self.memory, buffer, file = place(driver, canaries)
        self.transport = driver(options)
        self.transport.register([Region(1, buffer, block_bytes, layout_hash, file)])

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


class KVTransportSuite(Conformance):
    """Fixtures: options, here (our transport) and peer (the other process)."""

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
        settings: dict[str, Any] = {"attempt": 0, "region_ids": (1,), "deadline_s": 30.0} | more
        return TransferPlan(
            transfer_id=transfer_id, source_blocks=source, target_blocks=target, **settings
        )

    def fence(self, side: Side, name: str) -> None:
        deadline = time.monotonic() + 30
        while not side.transport.fence(name):
            assert time.monotonic() < deadline, "fence() never resolved"
            time.sleep(0.01)
