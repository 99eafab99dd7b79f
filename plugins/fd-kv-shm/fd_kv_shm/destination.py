"""The pulling side of a shared-memory transport: asks for blocks, copies them to their places.

Runs in the transport's thread and holds its lock for at most one block's copy.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fd_scale_out.receiver_driven import Transfer, WireError

from . import wire
from .link import Link

if TYPE_CHECKING:
    from .pump import Pump
    from .shm import SharedMemoryTransport


class Destination:
    """What a pump does for its own transfers."""

    def __init__(self, transport: SharedMemoryTransport, pump: Pump) -> None:
        self._transport = transport
        self._pump = pump
        self._lock = transport.lock

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
        for index in range(message.first, message.first + message.count):
            with self._lock:
                transfer = self._pump.by_serial.get(message.serial)
                if link.closed_reason or transfer is None or transfer.peer != link.peer:
                    return
                shown = link.shown.get(transfer.plan.region_ids[0])
                if index != transfer.num_copied or index >= transfer.num_asked or shown is None:
                    raise WireError(f"block {index} may be copied where it was not asked for")
                self._pump.peers[transfer.peer].last_progress = time.monotonic()
                size = transfer.block_bytes
                at = int(transfer.plan.source_blocks[index]) * size
                if at + size > len(shown):
                    raise WireError(f"the memory that was shown has no block {at // size}")
                self._transport.land(transfer, index, shown[at : at + size])

    def copy(self, link: Link, message: wire.Ready) -> None:
        """Blocks are in the staging area: copy them to their places."""
        for index, slot in message.items:
            with self._lock:
                transfer = self._pump.by_serial.get(message.serial)
                # Cancelled, failed, fenced or another link's: the bytes are not wanted any more.
                if link.closed_reason or transfer is None or transfer.peer != link.peer:
                    break
                if index != transfer.num_copied:
                    raise WireError(f"block {index} came where {transfer.num_copied} was due")
                self._pump.peers[transfer.peer].last_progress = time.monotonic()
                with link.slot(slot, transfer.block_bytes) as source:
                    self._transport.land(transfer, index, source)
        with self._lock:
            if not link.closed_reason:
                link.send(wire.Free([slot for _, slot in message.items]))
