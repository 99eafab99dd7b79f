"""Which blocks of a prompt go to another instance, and how those of all groups of layers are
numbered."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from fastdeploy_core.kvcache import CacheEntry, HostTier


class Parts:
    """Numbers 0, 1, ... are the prompt's blocks in the first group of layers; after them come
    those that each bounded group needs at the prompt's end, group by group."""

    def __init__(
        self, spans: Sequence[range], most: Sequence[int], bases: Sequence[int] = (0,)
    ) -> None:
        """Of each group. spans: its blocks of tokens; most: how many pass at once; bases: the
        number of its first host block among those of all groups (Tiers)."""
        self._spans, self._most, self._bases = spans, most, bases
        self._starts = list(accumulate(map(len, spans), initial=0))
        self.total = self._starts[-1]

    def place(self, number: int) -> tuple[int, int]:
        """The group, and the block of tokens."""
        group = bisect_right(self._starts, number, hi=len(self._spans)) - 1
        return group, self._spans[group][number - self._starts[group]]

    def together(self, first: int, end: int) -> range:
        """Of the numbers from `first` up to `end`, the leading ones that pass at once."""
        group = self.place(first)[0]
        return range(first, min(end, self._starts[group + 1], first + self._most[group]))

    def within_group(self, number: int, blocks: Sequence[int]) -> list[int]:
        """Host blocks of the group of `number`, as its own tier numbers them."""
        base = self._bases[self.place(number)[0]]
        return [block - base for block in blocks]


class Tiers:
    """The host tiers of all groups of layers as one: blocks are numbered group after group."""

    def __init__(self, tiers: Sequence[HostTier]) -> None:
        self.all = tiers
        self.bases = list(accumulate((tier.num_blocks for tier in tiers), initial=0))
        self.num_blocks = self.bases[-1]

    def place(self, block: int) -> tuple[int, int]:
        """The group, and the block's number there."""
        group = bisect_right(self.bases, block) - 1
        return group, block - self.bases[group]

    def reserve(self, group: int, count: int) -> list[int]:
        """See HostTier."""
        return [self.bases[group] + block for block in self.all[group].reserve(count)]

    def end_lease(self, block: int) -> None:
        """See HostTier."""
        group, number = self.place(block)
        self.all[group].end_lease(number)

    def take_written(self) -> list[tuple[int, CacheEntry, int]]:
        """See HostTier; with the group."""
        return [
            (group, entry, self.bases[group] + block)
            for group, tier in enumerate(self.all)
            for entry, block in tier.take_written()
        ]

    def write_through(self, does: bool) -> None:
        """Whether new blocks are saved at once."""
        for tier in self.all:
            tier.writes_through = does
