"""Numbered KV blocks: who references them, which are free, which free ones still hold a prefix.

Bookkeeping only: here a block is a number; its memory belongs to the workers. A block is in exactly
one state: referenced; free and empty; free and cached (reusable, the least recently used is evicted
first); or quarantined (a peer may still write to it, so it is not allocated until it is released).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from fastdeploy_core.errors import OutOfBlocks


class BlockPool:
    """Reference-counted blocks 0 to num_blocks - 1.

    `on_evict(block, is_intact)` is called when a cached block stops being cached. is_intact is True
    when the block is about to be allocated to another sequence, so its content may be saved first.
    It is False when a peer may write to the block. Before the call, `share` takes a free cached
    block back with its content.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int, bool], None] | None = None
        self._references = [0] * num_blocks
        self._is_cached = bytearray(num_blocks)
        self._free: deque[int] = deque(range(num_blocks))
        self._cached_free: OrderedDict[int, None] = OrderedDict()
        self._quarantined: set[int] = set()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could return now."""
        return len(self._free) + len(self._cached_free)

    @property
    def num_cached(self) -> int:
        """Free blocks that hold a reusable prefix."""
        return len(self._cached_free)

    @property
    def num_quarantined(self) -> int:
        """Withheld blocks, referenced or not."""
        return len(self._quarantined)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        idle = sum(1 for block in self._quarantined if not self._references[block])
        return self.num_blocks - self.num_available - idle

    def references(self, block: int) -> int:
        """Number of references to the block."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks with one reference each: empty blocks first (last released, first
        allocated), then the least recently used cached ones."""
        if count > self.num_available:
            raise OutOfBlocks(
                f"{count} blocks were asked for and {self.num_available} of {self.num_blocks} are "
                "free; the batch scheduler must preempt a sequence first"
            )
        free, references, blocks = self._free, self._references, []
        for _ in range(count):
            if free:
                block = free.popleft()
            else:
                block, _ = self._cached_free.popitem(last=False)
                self._is_cached[block] = 0
                if self.on_evict is not None:
                    self.on_evict(block, True)
            references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Add a reference; a free cached block leaves the free list with its content."""
        if self._references[block] == 0:
            del self._cached_free[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block. Pass a table's blocks in reverse order, so that the
        ends of prefixes are evicted before their beginnings."""
        for block in blocks:
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released twice"
            if self._references[block] or block in self._quarantined:
                continue
            if self._is_cached[block]:
                self._cached_free[block] = None
            else:
                # last released, first allocated: used memory is in caches, unused memory may not
                # be mapped yet
                self._free.appendleft(block)

    def mark_cached(self, block: int) -> None:
        """The referenced block holds a prefix that may be reused once the block is free."""
        assert self._references[block] > 0, f"free block {block} cannot enter the cache"
        assert block not in self._quarantined, f"quarantined block {block} cannot enter the cache"
        self._is_cached[block] = 1

    def forget_cached(self, block: int) -> None:
        """The block's content is no longer reusable."""
        self._is_cached[block] = 0
        if block in self._cached_free:
            del self._cached_free[block]
            self._free.append(block)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Withhold blocks: free ones now, referenced ones when their last reference is dropped."""
        for block in blocks:
            if block in self._quarantined:
                continue
            if self._is_cached[block]:
                self._is_cached[block] = 0
                self._cached_free.pop(block, None)
                if self.on_evict is not None:
                    self.on_evict(block, False)
            elif self._references[block] == 0:
                self._free.remove(block)
            self._quarantined.add(block)

    def release_quarantine(self, blocks: Iterable[int]) -> None:
        """No peer can write to these blocks any more. Unknown blocks are ignored."""
        for block in blocks:
            if block not in self._quarantined:
                continue
            self._quarantined.discard(block)
            if self._references[block] == 0:
                self._free.append(block)

    def is_quarantined(self, block: int) -> bool:
        """Whether the block is withheld."""
        return block in self._quarantined

    def check(self) -> None:
        """Raise AssertionError unless each block is in exactly one state; for tests, idle time."""
        free, cached = set(self._free), set(self._cached_free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached, "a block is both empty and cached"
        assert not (free | cached) & self._quarantined, "a quarantined block is free"
        for block, count in enumerate(self._references):
            is_free = block in free or block in cached
            is_withheld = block in self._quarantined
            assert count >= 0, f"block {block} has {count} references"
            assert is_free or is_withheld or count, f"block {block} is leaked"
            assert not (is_free and count), f"block {block} is free and referenced"
        assert all(self._is_cached[block] for block in cached), "an uncached block is in the cache"
