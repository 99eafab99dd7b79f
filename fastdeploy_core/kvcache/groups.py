"""Groups of layers that need a bounded part of a sequence alone: windows, chunks and states.

Layers with equal rules (contracts.model.Retention) form a group with blocks of its own numbers.
Layers that need every token are in the first group, which is the manager's own pool and may have
no layer at all; here are the others. Every table has one entry for each block of tokens, in all
groups; entries in front of what a group needs are no blocks of the sequence any more.

A state stays in its block while the sequence grows: the entries of all blocks of tokens that it has
passed name this one. At an anchor, or where another sequence may resume, the block is left as it is
and the state goes on in a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fastdeploy_core.contracts.model import Retention

from .blocks import BlockPool
from .host_tier import HostTier

if TYPE_CHECKING:
    from fastdeploy_core.contracts.model import AttentionSpec, StateSpec

    from .prefix import BlockTable, CacheEntry


def bounded_rules(layers: Iterable[AttentionSpec | StateSpec]) -> tuple[Retention, ...]:
    """The distinct rules of layers that do not need every token, in the order of the layers."""
    return tuple(dict.fromkeys(s.retention for s in layers if s.retention.kind != "all"))


class GroupPlan(NamedTuple):
    """A bounded group's pool."""

    rule: Retention
    num_blocks: int
    most_blocks: int  # that one sequence ever holds
    num_host_blocks: int = 0


class GroupTable:
    """One sequence's blocks in a bounded group."""

    __slots__ = ("blocks", "num_gone")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.num_gone = 0  # leading entries that went back to the pool, or never came

    @property
    def held(self) -> list[int]:
        """The blocks that are the sequence's."""
        return list(dict.fromkeys(self.blocks[self.num_gone :]))

    def is_last(self, index: int) -> bool:
        """Whether the entry's block has no later one: a state there is that of the entry's end."""
        return self.blocks[index + 1 : index + 2] != [self.blocks[index]]


class BoundedGroup:
    """The pool of one group, and the blocks in it that prefixes of the cache can be resumed with.

    Blocks are findable only where somebody may resume: in front of an anchor, which is a block end
    that the scheduler knows to be worth it, and in front of a sequence's end.
    """

    def __init__(self, plan: GroupPlan, block_size: int) -> None:
        self.rule, self.most_blocks = plan.rule, plan.most_blocks
        self.is_state = plan.rule.kind == "state"
        self.pool = BlockPool(plan.num_blocks)
        self.pool.on_evict = self._on_evict
        self.host = HostTier(plan.num_host_blocks)
        self._block_size = block_size
        self._block_of: dict[CacheEntry, int] = {}
        self._entry_of: dict[int, CacheEntry] = {}

    def needed(self, num_blocks: int) -> range:
        """Which blocks of a sequence of so many full ones its next tokens read."""
        size = self._block_size
        return range(self.rule.first_needed(num_blocks * size) // size, num_blocks)

    def num_needed(self, entries: Sequence[CacheEntry], num_blocks: int) -> int:
        """Free blocks that a sequence takes, at most, which resumes after these entries and will
        have num_blocks blocks of tokens."""
        shared = [self._block_of.get(entries[i]) for i in self.needed(len(entries))]
        num_taken = sum(block is None or not self.pool.references(block) for block in shared)
        return min(num_taken + max(0, num_blocks - len(entries)), self.most_blocks)

    def start(self, table: GroupTable, entries: Sequence[CacheEntry]) -> None:
        """Give an empty table what it needs of the entries that it resumes after. What lies in host
        memory alone comes back with the next step."""
        needed = self.needed(len(entries))
        shared = [entries[i] for i in needed]
        lacking = [entry for entry in shared if entry not in self._block_of]
        for entry in lacking:  # allocating could evict what is not pinned or referenced
            self.host.pin(entry)
        for entry in shared:
            if entry in self._block_of:
                self.pool.share(self._block_of[entry])
        for entry, block in zip(lacking, self.pool.allocate(len(lacking)), strict=True):
            self.host.load(entry, block)
            self.attach(entry, block)
        table.num_gone = needed.start
        table.blocks = [0] * needed.start + [self._block_of[entry] for entry in shared]

    def num_new(self, table: GroupTable, anchors: Sequence[int], count: int) -> int:
        """Free blocks that the table takes to grow by so many blocks of tokens."""
        if not self.is_state:
            return count
        if not table.blocks or len(table.blocks) in anchors:
            return 1
        last = table.blocks[-1]
        return int(last in self._entry_of or self.pool.references(last) > 1)

    def grow(self, table: GroupTable, anchors: Sequence[int], count: int) -> None:
        """The caller has compared num_new with the pool."""
        new = self.pool.allocate(self.num_new(table, anchors, count))
        table.blocks += [*new, *[(new or table.blocks)[-1]] * (count - len(new))]

    def let_go(self, table: GroupTable, num_blocks: int) -> None:
        """Release what no token after num_blocks full blocks reads."""
        first = min(self.needed(num_blocks).start, len(table.blocks))
        if first > table.num_gone:
            gone = [table.blocks[i] for i in range(table.num_gone, first) if table.is_last(i)]
            self.pool.release(reversed(gone))
            table.num_gone = first

    def attach(self, entry: CacheEntry, block: int) -> None:
        """The entry's tokens can be found in this block, unless another one has them."""
        if entry not in self._block_of and block not in self._entry_of:
            self._block_of[entry], self._entry_of[block] = block, entry
            self.pool.mark_cached(block)
            if self.host.writes_through:
                self.host.write_through(entry, block)

    def write_through(self, entry: CacheEntry) -> None:
        """See HostTier; nothing where no block holds the entry's tokens."""
        if self.has(entry):
            self.host.write_through(entry, self._block_of.get(entry, -1))

    def adopt(self, entry: CacheEntry, host_block: int) -> None:
        """A reserved host block has got what the entry's tokens left in this group."""
        if not self.has(entry):
            self.host.adopt(entry, host_block)

    def forget(self, entry: CacheEntry) -> None:
        """The entry is no more."""
        self.host.forget(entry)
        block = self._block_of.pop(entry, None)
        if block is not None:
            del self._entry_of[block]
            self.pool.forget_cached(block)

    def clear(self) -> None:
        """Forget every entry."""
        for entry in list(self._block_of):
            self.forget(entry)
        self.host.clear()

    def is_loaded(self, entry: CacheEntry) -> bool:
        """Whether a block on the device holds the entry's tokens."""
        return entry in self._block_of

    def has(self, entry: CacheEntry) -> bool:
        """Whether they are there or in host memory."""
        return entry in self._block_of or entry in self.host

    def check(self) -> None:
        """Raise AssertionError unless blocks and entries belong together."""
        self.pool.check()
        self.host.check()
        assert {b: e for e, b in self._block_of.items()} == self._entry_of, "entries differ"

    def _on_evict(self, block: int, is_intact: bool) -> None:
        entry = self._entry_of.pop(block)
        del self._block_of[entry]
        if is_intact:
            self.host.save(entry, block)


def num_resumable(groups: Sequence[BoundedGroup], entries: Sequence[CacheEntry]) -> int:
    """The most of these entries after which every group has all that it needs."""
    runs, best = [0] * len(groups), 0
    for number, entry in enumerate(entries, 1):
        runs = [run + 1 if g.has(entry) else 0 for run, g in zip(runs, groups, strict=True)]
        if all(run >= len(g.needed(number)) for run, g in zip(runs, groups, strict=True)):
            best = number
    return best


def make_findable(
    groups: Sequence[BoundedGroup], table: BlockTable, entries: Sequence[CacheEntry], end: int
) -> None:
    """A sequence can be resumed after its first `end` blocks from now on, as far as the table still
    holds what that needs. entries: of these blocks, the last ones alone will do."""
    first = end - len(entries)
    for group, own in zip(groups, table.more, strict=True):
        for index in group.needed(end):
            if index >= max(first, own.num_gone) and own.is_last(index):
                group.attach(entries[index - first], own.blocks[index])
