"""The serving side of a shared-memory transport: checks requests, copies blocks to be fetched.

Runs in the transport's thread and holds its lock for at most one block's copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fd_scale_out.receiver_driven import WireError

from . import wire
from .link import MAX_QUEUED_BLOCKS, Link

if TYPE_CHECKING:
    from .shm import SharedMemoryTransport

_BLOCKS_PER_TURN: Final = 16  # one peer's share before the others get theirs


class Source:
    """What a pump does for peers that pull from this process."""

    def __init__(self, transport: SharedMemoryTransport) -> None:
        self._transport = transport
        self._lock = transport.lock

    def queue(self, link: Link, message: wire.Read) -> None:
        """Check a request and queue its blocks; a bad one is refused before a byte is copied."""
        with self._lock:
            region = self._transport.regions.get(message.region_id)
            if region is None or not message.blocks:
                reason = f"no region {message.region_id}, or no blocks"
                link.send(wire.Refused(message.serial, reason))
                return
            if len(message.blocks) + len(link.queue) > MAX_QUEUED_BLOCKS:
                raise WireError("more blocks requested than may wait")
            if min(message.blocks) < 0 or max(message.blocks) >= region[0].num_blocks:
                reason = f"block out of range, there are {region[0].num_blocks}"
                link.send(wire.Refused(message.serial, reason))
                return
            if message.region_id in link.shows:
                link.send(wire.Here(message.serial, message.first, len(message.blocks)))
                return
            link.queue.extend(
                (message.serial, message.region_id, message.first + i, block)
                for i, block in enumerate(message.blocks)
            )

    def stage(self, link: Link) -> None:
        """Copy requested blocks into free slots, and say so."""
        ready: dict[int, list[tuple[int, int]]] = {}
        for _ in range(_BLOCKS_PER_TURN):
            with self._lock:
                if link.closed_reason or not (link.queue and link.free_slots):
                    break
                serial, region_id, index, block = link.queue.popleft()
                slot = link.free_slots.popleft()
                region, view = self._transport.regions[region_id]
                start = block * region.block_bytes
                target = link.slot(slot, region.block_bytes)
                target[:] = view[start : start + region.block_bytes]
                target.release()
                ready.setdefault(serial, []).append((index, slot))
        with self._lock:
            if not link.closed_reason:
                for serial, items in ready.items():
                    link.send(wire.Ready(serial, items))

    def free(self, link: Link, slots: list[int]) -> None:
        """The peer has copied these slots out."""
        with self._lock:
            if len(slots) + len(link.free_slots) > link.num_slots or not all(
                0 <= s < link.num_slots for s in slots
            ):
                raise WireError("slots freed that were not in use")
            link.free_slots.extend(slots)

    def drop(self, link: Link, serial: int) -> None:
        """The peer no longer wants a transfer."""
        with self._lock:
            kept = [q for q in link.queue if q[0] != serial]
            link.queue.clear()
            link.queue.extend(kept)
