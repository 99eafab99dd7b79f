"""The pulling side of a shared-memory transport: asks for blocks, copies them to their places.

The only code that writes a destination block. Runs in the transport's thread and holds its lock for
at most one block's copy.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastdeploy_core.contracts.kv_transport import TransferEvent, TransferEventKind

from . import wire
from .link import Link
from .state import Transfer

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
        if transfer.num_requested > transfer.num_copied or transfer.num_requested == len(blocks):
            return
        first = transfer.num_requested
        part = blocks[first : first + wire.MAX_READ_BLOCKS]
        link.send(
            wire.Read(transfer.serial, transfer.plan.region_ids[0], first, [int(b) for b in part])
        )
        transfer.num_requested += len(part)

    def copy(self, link: Link, message: wire.Ready) -> None:
        """Destination side: the only place that writes a destination block."""
        for index, slot in message.items:
            with self._lock:
                transfer = self._pump.by_serial.get(message.serial)
                # Cancelled, failed, fenced or another link's: the bytes are not wanted any more.
                if link.closed_reason or transfer is None or transfer.peer != link.peer:
                    break
                if index != transfer.num_copied:
                    raise wire.WireError(f"block {index} came where {transfer.num_copied} was due")
                source = link.slot(slot, transfer.block_bytes)
                start = int(transfer.plan.target_blocks[index]) * transfer.block_bytes
                transfer.view[start : start + transfer.block_bytes] = source
                source.release()
                self._progress(transfer)
        with self._lock:
            if not link.closed_reason:
                link.send(wire.Free([slot for _, slot in message.items]))

    def _progress(self, transfer: Transfer) -> None:
        total = len(transfer.plan.source_blocks)
        transfer.num_copied += 1
        transfer.num_bytes += transfer.block_bytes
        self._pump.peers[transfer.peer].last_progress = time.monotonic()
        if transfer.num_copied == total:
            self._pump.forget(transfer)
            self._transport.finish(transfer, TransferEventKind.DONE)
        elif transfer.num_copied * 4 // total != (transfer.num_copied - 1) * 4 // total:
            self._transport.emit(
                TransferEvent(
                    TransferEventKind.PROGRESS,
                    transfer.peer,
                    transfer.plan.transfer_id,
                    transfer.num_bytes,
                )
            )
