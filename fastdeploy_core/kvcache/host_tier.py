"""The host tier: cached blocks evicted from a group's pool are kept in host memory until their
next hit.

Bookkeeping, and the list of copies for the next step. The workers own the memory and do the copies
before that step's forward pass: first device to host, then host to device, then within the device.

Where blocks are also kept elsewhere (a KV store), others read and write host blocks meanwhile: such
a block is leased, and nothing else gets it before its lease ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .prefix import CacheEntry


class HostTier:
    """num_blocks host blocks of a group of layers, least recently used first out; 0: none."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_drop: Callable[[CacheEntry], None] | None = None
        self.num_saved_total = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._entries: OrderedDict[CacheEntry, int] = OrderedDict()  # their host blocks
        # Entries that a copy of the step under construction reads or writes. No other copy of that
        # step may use their host blocks.
        self.busy: set[CacheEntry] = set()
        self._device_to_host: list[tuple[int, int]] = []
        self._host_to_device: list[tuple[int, int]] = []
        self.writes_through = False  # new blocks are saved at once, not when they are evicted
        self._written: list[CacheEntry] = []  # by copies of the step under construction
        self._leased: set[int] = set()
        self._ownerless: set[int] = set()  # of these, blocks that hold no entry

    def __contains__(self, entry: CacheEntry) -> bool:
        return entry in self._entries

    @property
    def has_copies(self) -> bool:
        """Whether blocks are to be copied to host memory with the next step."""
        return bool(self._device_to_host)

    @property
    def num_used(self) -> int:
        """Host blocks that hold something."""
        return self.num_blocks - len(self._free)

    def save(self, entry: CacheEntry, block: int) -> None:
        """Keep the content of a device block that is about to be reused, if there is room."""
        if entry in self._entries:
            self._entries.move_to_end(entry)
            return
        if not self._free and not self._make_room():
            return
        host_block = self._entries[entry] = self._free.pop()
        self.busy.add(entry)
        self._device_to_host.append((block, host_block))
        self.num_saved_total += 1

    def load(self, entry: CacheEntry, block: int) -> None:
        """Bring the content back into a device block; the host copy stays."""
        self._entries.move_to_end(entry)
        self.busy.add(entry)
        self._host_to_device.append((self._entries[entry], block))

    def pin(self, entry: CacheEntry) -> None:
        """Do not drop this entry before the next `take_copies`."""
        self.busy.add(entry)

    def write_through(self, entry: CacheEntry, block: int) -> None:
        """Keep the content of a new entry's device block, if there is room; see take_written."""
        self.save(entry, block)
        if entry in self._entries:
            self._written.append(entry)

    def take_written(self) -> list[tuple[CacheEntry, int]]:
        """What the copies taken last write through, with host blocks that are leased now."""
        written = [(e, self._entries[e]) for e in self._written if e in self._entries]
        self._written = []
        self._leased.update(host_block for _, host_block in written)
        return written

    def reserve(self, count: int) -> list[int]:
        """At most so many leased host blocks that hold no entry, for others to fill."""
        blocks: list[int] = []
        while len(blocks) < count and (self._free or self._make_room()):
            blocks.append(self._free.pop())
        self._leased.update(blocks)
        self._ownerless.update(blocks)
        return blocks

    def adopt(self, entry: CacheEntry, host_block: int) -> None:
        """A reserved block has got the entry's content."""
        self._ownerless.discard(host_block)
        self._entries[entry] = host_block

    def end_lease(self, host_block: int) -> None:
        """Nobody else reads or writes the block any more."""
        self._leased.discard(host_block)
        if host_block in self._ownerless:
            self._ownerless.discard(host_block)
            self._free.append(host_block)

    def forget(self, entry: CacheEntry) -> None:
        """Free the entry's host block, if it has one. No copy of the step under construction may
        write there any more: the next owner's does."""
        block = self._entries.pop(entry, None)
        if block is None:
            return
        if entry in self.busy:
            self._device_to_host = [pair for pair in self._device_to_host if pair[1] != block]
        if block in self._leased:
            self._ownerless.add(block)
        else:
            self._free.append(block)

    def clear(self) -> None:
        """Drop everything, copies not taken yet included."""
        self._entries.clear()
        self.busy.clear()
        self._device_to_host, self._host_to_device, self._written = [], [], []
        self._ownerless = self._leased.copy()
        self._free = sorted(set(range(self.num_blocks)) - self._leased, reverse=True)

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(device to host, host to device) copies for the step that is now complete."""
        copies = self._device_to_host, self._host_to_device
        self._device_to_host, self._host_to_device = [], []
        self.busy.clear()
        return copies

    def check(self) -> None:
        """Raise AssertionError unless each host block has exactly one owner."""
        owned = sorted([*self._entries.values(), *self._free, *self._ownerless])
        assert owned == list(range(self.num_blocks)), "host block leaked"
        assert self._ownerless <= self._leased, "a host block has neither entry nor lease"

    def _make_room(self) -> bool:
        for entry, block in self._entries.items():
            if entry not in self.busy and block not in self._leased:
                self.forget(entry)
                if self.on_drop is not None:
                    self.on_drop(entry)
                return True
        return False
