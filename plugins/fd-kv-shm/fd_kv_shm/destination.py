"""The pulling side of a shared-memory transport: asks for blocks, copies them to their places.

Runs in the transport's thread. Where there are processors to spare, a second thread copies a part
of what can be copied at once.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeGuard

from fd_scale_out.receiver_driven import LANDING_BYTES, Transfer, WireError

from . import wire
from .link import Link

if TYPE_CHECKING:
    from .pump import Pump
    from .shm import SharedMemoryTransport


_ENOUGH_PROCESSORS: Final = 2  # for a second thread
_WORTH_BYTES: Final = 1 << 20  # to wake it for


class Destination:
    """What a pump does for its own transfers."""

    def __init__(self, transport: SharedMemoryTransport, pump: Pump) -> None:
        self._transport = transport
        self._pump = pump
        self._lock = transport.lock
        has_more = len(os.sched_getaffinity(0)) >= _ENOUGH_PROCESSORS
        self._helper = ThreadPoolExecutor(1, "fd-kv-shm") if has_more else None

    def close(self) -> None:
        """The helper ends."""
        if self._helper is not None:
            self._helper.shutdown()

    def request(self, link: Link, transfer: Transfer) -> None:
        """Ask for the next blocks; at most one message's worth is outstanding per transfer."""
        blocks = transfer.plan.source_blocks
        if transfer.num_asked > transfer.num_copied or transfer.num_asked == len(blocks):
            return
        first = transfer.num_asked
        part = blocks[first : first + wire.MAX_READ_BLOCKS]
        link.send(
            wire.Read(transfer.serial, transfer.plan.region_ids[0], first, [int(b) for b in part])
        )
        transfer.num_asked += len(part)

    def take(self, link: Link, message: wire.Here) -> None:
        """Blocks may be copied from where the source has them."""
        at, end = message.first, message.first + message.count
        while at < end:
            with self._lock:
                transfer = self._pump.by_serial.get(message.serial)
                if link.closed_reason or not _is_wanted(transfer, link):
                    return
                shown = link.shown.get(transfer.plan.region_ids[0])
                if at != transfer.num_copied or end > transfer.num_asked or shown is None:
                    raise WireError(f"block {at} may be copied where it was not asked for")
                size = transfer.block_bytes
                numbers = transfer.plan.source_blocks[at : min(end, at + _group(size))]
                if (int(max(numbers)) + 1) * size > len(shown):
                    raise WireError(f"the memory that was shown has no block {max(numbers)}")
                self._pump.peers[transfer.peer].last_progress = time.monotonic()
            self._land(transfer, at, [shown[int(n) * size : (int(n) + 1) * size] for n in numbers])
            at += len(numbers)

    def _land(self, transfer: Transfer, first: int, blocks: list[memoryview]) -> None:
        """Returns when all are copied."""
        half = len(blocks) // 2
        if self._helper is None or half * transfer.block_bytes < _WORTH_BYTES:
            self._transport.land_all(transfer, first, blocks)
            return
        land = self._transport.land_all
        other = self._helper.submit(land, transfer, first + half, blocks[half:])
        land(transfer, first, blocks[:half])
        other.result()

    def copy(self, link: Link, message: wire.Ready) -> None:
        """Blocks are in the staging area: copy them to their places."""
        for index, slot in message.items:
            with self._lock:
                transfer = self._pump.by_serial.get(message.serial)
                # Cancelled, failed, fenced or another link's: the bytes are not wanted any more.
                if link.closed_reason or not _is_wanted(transfer, link):
                    break
                if index != transfer.num_copied:
                    raise WireError(f"block {index} came where {transfer.num_copied} was due")
                self._pump.peers[transfer.peer].last_progress = time.monotonic()
                source = link.slot(slot, transfer.block_bytes)
            self._transport.land_all(transfer, index, [source])
            source.release()
        with self._lock:
            if not link.closed_reason:
                link.send(wire.Free([slot for _, slot in message.items]))


def _is_wanted(transfer: Transfer | None, link: Link) -> TypeGuard[Transfer]:
    return transfer is not None and transfer.peer == link.peer and not transfer.is_over


def _group(block_bytes: int) -> int:
    """Blocks that are copied before the transport looks at something else."""
    return max(1, 4 * LANDING_BYTES // block_bytes)
