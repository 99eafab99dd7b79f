"""Which instance probably has which prefix cached.

The index holds what was sent where, not what an engine keeps: each instance's entries are bounded
and the least recently used go first, as in an engine's own cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

Key = bytes


def chained_keys(
    data: bytes, block_bytes: int, salt: bytes = b"", most: int | None = None
) -> list[Key]:
    """A key for each full block of `data`; equal keys mean equal data from the beginning on.

    block_bytes: bytes of a block (token ids: encode each in the same number of bytes).
    salt: separates what must not be shared, such as models.
    most: stop after so many blocks.

    A key depends on the salt and on all blocks before it, and has 16 bytes. ValueError for a block
    size below 1.
    """
    if block_bytes < 1:
        raise ValueError(f"block_bytes={block_bytes}: a block has at least one byte")
    count = len(data) // block_bytes
    if most is not None:
        count = min(count, most)
    keys: list[Key] = []
    last = blake2b(salt, digest_size=16).digest()
    for start in range(0, count * block_bytes, block_bytes):
        last = blake2b(data[start : start + block_bytes], digest_size=16, key=last).digest()
        keys.append(last)
    return keys


class PrefixIndex:
    """Prefix blocks by instance. A block is held only together with all blocks before it."""

    def __init__(self, blocks_per_instance: int = 65_536) -> None:
        """blocks_per_instance: entries kept of each instance; its KV cache in blocks, or fewer."""
        if blocks_per_instance < 1:
            raise ValueError(f"blocks_per_instance={blocks_per_instance} is below 1")
        self._limit = blocks_per_instance
        self._holders: dict[Key, set[str]] = {}
        self._held: dict[str, OrderedDict[Key, None]] = {}  # the least recently used first

    def record(self, instance: str, keys: Sequence[Key]) -> None:
        """A prompt with these keys went to the instance."""
        held = self._held.setdefault(instance, OrderedDict())
        # The last block first: then a block is always more recent than those that follow it, and
        # eviction takes a prefix's end before its beginning.
        for key in reversed(keys[: self._limit]):
            if key in held:
                held.move_to_end(key)
                continue
            held[key] = None
            self._holders.setdefault(key, set()).add(instance)
        while len(held) > self._limit:
            self._release(instance, held.popitem(last=False)[0])

    def forget(self, instance: str) -> None:
        """The instance restarted or is gone: nothing of it is cached any more."""
        for key in self._held.pop(instance, ()):
            self._release(instance, key)

    def cached_blocks(self, instance: str, keys: Sequence[Key]) -> int:
        """How many of the first blocks the instance has; takes log(len(keys)) look-ups."""
        held = self._held.get(instance)
        if not held or not keys or keys[0] not in held:
            return 0
        return bisect_left(keys, True, key=lambda key: key not in held)

    def owners(self, keys: Sequence[Key]) -> frozenset[str] | set[str]:
        """The instances that have most of the first blocks; empty where none has the first one."""
        held = self._holders
        if not keys or keys[0] not in held:
            return frozenset()
        return held[keys[bisect_left(keys, True, key=lambda key: key not in held) - 1]]

    def num_blocks(self, instance: str) -> int:
        """Entries of the instance."""
        return len(self._held.get(instance, ()))

    def _release(self, instance: str, key: Key) -> None:
        holders = self._holders[key]
        holders.discard(instance)
        if not holders:
            del self._holders[key]
