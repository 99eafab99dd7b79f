"""The host tier: cached blocks evicted from the device pool are kept in host memory until their
next hit.

Bookkeeping, and the list of copies for the next step. The workers own the memory and do the copies
before that step's forward pass: first device to host, then host to device, then within the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .prefix import CacheEntry


class HostTier:
    """num_blocks host blocks, least recently used first out."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_drop: Callable[[CacheEntry], None] | None = None
        self.num_saved_total = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._entries: OrderedDict[CacheEntry, None] = OrderedDict()
        # Entries that a copy of the step under construction reads or writes. No other copy of that
        # step may use their host blocks.
        self._busy: set[CacheEntry] = set()
        self._device_to_host: list[tuple[int, int]] = []
        self._host_to_device: list[tuple[int, int]] = []

    @property
    def num_used(self) -> int:
        """Host blocks that hold something."""
        return self.num_blocks - len(self._free)

    def save(self, entry: CacheEntry, block: int) -> None:
        """Keep the content of a device block that is about to be reused, if there is room."""
        if entry.host_block is not None:
            self._entries.move_to_end(entry)
            return
        if not self._free and not self._make_room():
            return
        entry.host_block = self._free.pop()
        self._entries[entry] = None
        self._busy.add(entry)
        self._device_to_host.append((block, entry.host_block))
        self.num_saved_total += 1

    def load(self, entry: CacheEntry, block: int) -> None:
        """Bring the content back into a device block; the host copy stays."""
        assert entry.host_block is not None, "a block that is not in host memory cannot be loaded"
        self._entries.move_to_end(entry)
        self._busy.add(entry)
        self._host_to_device.append((entry.host_block, block))

    def pin(self, entry: CacheEntry) -> None:
        """Do not drop this entry before the next `take_copies`."""
        self._busy.add(entry)

    def forget(self, entry: CacheEntry) -> None:
        """Free the entry's host block."""
        assert entry.host_block is not None, "an entry outside host memory cannot be forgotten"
        del self._entries[entry]
        self._free.append(entry.host_block)
        entry.host_block = None

    def clear(self) -> None:
        """Drop everything, copies not taken yet included. The caller resets the entries."""
        self._entries.clear()
        self._busy.clear()
        self._device_to_host, self._host_to_device = [], []
        self._free = list(range(self.num_blocks - 1, -1, -1))

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(device to host, host to device) copies for the step that is now complete."""
        copies = self._device_to_host, self._host_to_device
        self._device_to_host, self._host_to_device = [], []
        self._busy.clear()
        return copies

    def check(self) -> None:
        """Raise AssertionError unless each host block has exactly one owner."""
        held = [-1 if entry.host_block is None else entry.host_block for entry in self._entries]
        assert sorted([*held, *self._free]) == list(range(self.num_blocks)), "host block leaked"

    def _make_room(self) -> bool:
        for entry in self._entries:
            if entry not in self._busy:
                self.forget(entry)
                if self.on_drop is not None:
                    self.on_drop(entry)
                return True
        return False
