"""What the batch scheduler asks of the KV cache: match, start, grow, commit, let go, fork, free.

Every call either happens as a whole or not at all. Copies between memories are collected and leave
with the step under construction (`take_copies`); that step's forward pass comes after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastdeploy_core.types import NO_COPIES, BlockCopies, SequenceExtras

from .blocks import BlockPool
from .groups import BoundedGroup, GroupPlan, GroupTable, make_findable, num_resumable
from .host_tier import HostTier
from .prefix import BlockTable, CacheEntry, HashFunction, PrefixCache, sha256


class PrefixMatch(NamedTuple):
    """Cached blocks at the beginning of a sequence."""

    entries: list[CacheEntry]
    num_tokens: int  # tokens that these blocks hold
    num_host_tokens: int  # of these, tokens of which some group needs what host memory alone holds
    num_blocks_taken: int  # free blocks that `start` removes from the pool to take these


class ForkSource:
    """A prompt's computed blocks, held so that the other answers to it (n > 1) can share them."""

    __slots__ = ("blocks", "num_tokens")

    def __init__(self, blocks: list[int], num_tokens: int) -> None:
        self.blocks = blocks
        self.num_tokens = num_tokens


NO_MATCH = PrefixMatch([], 0, 0, 0)
NEVER = 2**62


class KVCacheManager:
    """The device pool, its prefix cache and host tier, and those of bounded groups."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        enable_output_caching: bool = True,
        model_identity: str = "",
        hash_function: HashFunction = sha256,
        key_lookahead: int = 0,
    ) -> None:
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self.caches_output = enable_output_caching
        self.pool = BlockPool(num_blocks)
        self.host = HostTier(num_host_blocks if enable_prefix_caching else 0)
        self.prefix = PrefixCache(
            self.pool, block_size, model_identity, self.host, hash_function, key_lookahead
        )
        self.bounded: list[BoundedGroup] = []
        self._cuts, self._growing, self.tiers = False, [self.pool], [self.host]
        self._device_to_device: list[tuple[int, int]] = []
        # Blocks that a copy of the step under construction reads. They become free when that step
        # is complete.
        self._release_after_step: list[int] = []

    def add_groups(self, plans: Iterable[GroupPlan], *, cuts: bool = True) -> None:
        """The model has these bounded groups beside the first one; called before any table is
        made. cuts: prompts may be computed in parts. There are no forks then: blocks within the
        device are copied in the first group alone."""
        self.bounded = [BoundedGroup(plan, self.block_size) for plan in plans]
        self._cuts = cuts and any(group.is_state for group in self.bounded)
        self._growing = [self.pool, *(g.pool for g in self.bounded if not g.is_state)]
        self.tiers = [self.host, *(group.host for group in self.bounded)]
        if self.bounded:
            self.prefix.on_drop = self._on_drop

    @property
    def num_available(self) -> int:
        """Blocks of tokens by which sequences could grow now: every group gives one for each, but
        states, which stay where they are."""
        if not self.bounded:
            return self.pool.num_available
        return min(pool.num_available for pool in self._growing)

    @property
    def num_empty(self) -> int:
        """The same without evicting a cached prefix."""
        return min(pool.num_available - pool.num_cached for pool in self._growing)

    @property
    def num_used(self) -> int:
        """Blocks with a reference, of all groups."""
        return self.pool.num_used + sum(group.pool.num_used for group in self.bounded)

    def new_table(self, cache_salt: str = "", extras: SequenceExtras | None = None) -> BlockTable:
        """A table without blocks."""
        table = self.prefix.new_table(cache_salt, extras)
        table.more = [GroupTable() for _ in self.bounded]
        return table

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, table: BlockTable, token_ids: Sequence[int]) -> PrefixMatch:
        """Which of these tokens are cached. At least one token is always left to compute, because
        its logits are needed. Blocks are shared whole, so a full match gives up its last block."""
        num_blocks = min(
            (len(token_ids) - 1) // self.block_size, self.prefix.num_keyed(len(token_ids))
        )
        if not self.caching or num_blocks == 0:
            return NO_MATCH
        self.prefix.extend_keys(table, token_ids, num_blocks)
        entries = self.prefix.match(table, num_blocks)
        if self.bounded:
            # Worth keeping: where this sequence leaves what others had, and its prompt's end.
            table.anchors = (len(entries), num_blocks)
            entries = entries[: num_resumable(self.bounded, entries)]
        if not entries:
            return NO_MATCH
        loads, num_taken = set[CacheEntry](), 0
        for entry in entries:
            if entry.block is None:
                loads.add(entry)
            elif self.pool.references(entry.block) == 0:
                num_taken += 1
        num_taken += len(loads)
        for group in self.bounded:
            needed = [entries[i] for i in group.needed(len(entries))]
            loads.update(entry for entry in needed if not group.is_loaded(entry))
        size = self.block_size
        return PrefixMatch(entries, len(entries) * size, len(loads) * size, num_taken)

    def cut(self, table: BlockTable, start: int, count: int) -> int:
        """How many of so many tokens after `start` a step may feed: up to the next anchor, where a
        state can be kept only if it has not gone on."""
        if not self._cuts:
            return count
        ends = (anchor * self.block_size - start for anchor in table.anchors)
        return min([count, *(end for end in ends if end > 0)])

    def num_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free blocks that `start` would use."""
        missing = self.num_blocks_for(num_tokens) - len(match.entries)
        return match.num_blocks_taken + max(0, missing)

    def has_room(self, match: PrefixMatch, num_tokens: int, spare: int = 0) -> bool:
        """Whether `start`, and growing up to num_tokens later, finds its blocks, and leaves `spare`
        in the pool. Bounded groups are asked for no more than a sequence ever holds."""
        if self.num_needed(match, num_tokens) + spare > self.pool.num_available:
            return False
        num_blocks = self.num_blocks_for(num_tokens)
        for group in self.bounded:
            if group.num_needed(match.entries, num_blocks) > group.pool.num_available:
                return False
        return True

    def start(self, table: BlockTable, match: PrefixMatch, num_tokens: int) -> None:
        """Give an empty table the matched blocks and new ones up to num_tokens. The caller has
        compared `num_needed` with the pool."""
        assert not table.blocks, "a table is started once"
        assert self.num_needed(match, num_tokens) <= self.pool.num_available, "start without room"
        # Reference all matched blocks before allocating any, or an allocation could evict them.
        for entry in match.entries:
            if entry.block is not None:
                self.pool.share(entry.block)
            else:
                self.host.pin(entry)
        for entry in match.entries:
            block = entry.block
            if block is None:
                block = self.pool.allocate(1)[0]
                self.host.load(entry, block)
                self.prefix.attach(entry, block)
            table.blocks.append(block)
        table.num_committed = len(match.entries)
        table.tail = match.entries[-1] if match.entries else None
        table.num_passed = len(match.entries)
        for group, own in zip(self.bounded, table.more, strict=True):
            group.start(own, match.entries)
        self.grow(table, num_tokens)

    def grow(self, table: BlockTable, num_tokens: int) -> list[int] | None:
        """Append blocks until num_tokens fit; returns them, as BlockTable.interleaved has them.
        Without room: None, and nothing changes."""
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if missing <= 0:
            return []
        groups = list(zip(self.bounded, table.more, strict=True)) if self.bounded else ()
        if missing > self.pool.num_available or any(
            group.num_new(own, table.anchors, missing) > group.pool.num_available
            for group, own in groups
        ):
            return None
        blocks = self.pool.allocate(missing)
        table.blocks.extend(blocks)
        if not self.bounded:
            return blocks
        for group, own in groups:
            group.grow(own, table.anchors, missing)
        return table.interleaved(len(table.blocks) - missing)

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_tokens: int) -> None:
        """Keys and values of the first num_tokens tokens are computed: from now on the prefix cache
        finds their full blocks."""
        num_blocks = min(num_tokens // self.block_size, self.prefix.num_keyed(len(token_ids)))
        if num_blocks > table.num_committed and self.caching and table.is_cacheable:
            before = table.num_committed
            self.prefix.extend_keys(table, token_ids, num_blocks)
            self.prefix.commit(table, num_blocks)
            for anchor in table.anchors:
                if before < anchor <= table.num_committed:
                    self._make_findable(table, anchor)

    def let_go(self, table: BlockTable, num_tokens: int) -> None:
        """So many tokens are computed and certain: blocks that only they needed go back. Called
        after `commit`; steps in flight begin after these tokens."""
        table.num_passed = max(table.num_passed, num_tokens // self.block_size)
        for index, group in enumerate(self.bounded):
            group.let_go(table.more[index], table.num_passed)

    def next_commit(self, table: BlockTable, num_prompt_tokens: int) -> int:
        """The number of computed tokens at which `commit` would take the next block, or `let_go`
        might release one."""
        if self.bounded:
            return (table.num_passed + 1) * self.block_size
        end = (table.num_committed + 1) * self.block_size
        ends_in_output = end > num_prompt_tokens and not self.caches_output
        if not self.caching or not table.is_cacheable or ends_in_output:
            return NEVER
        return end

    def free(self, table: BlockTable) -> None:
        """Release the blocks. Those in the prefix cache can be hit until they are reallocated."""
        if self.bounded:
            if table.is_cacheable:
                self._make_findable(table, table.num_committed)
            for group, own in zip(self.bounded, table.more, strict=True):
                group.pool.release(reversed(own.held))
        self.pool.release(reversed(table.blocks))
        table.reset()

    def hold(self, table: BlockTable, num_tokens: int) -> ForkSource:
        """Keep blocks of the first num_tokens tokens for `fork` when the owner releases them."""
        blocks = table.blocks[: self.num_blocks_for(num_tokens)]
        for block in blocks:
            self.pool.share(block)
        return ForkSource(blocks, num_tokens)

    def fork(self, source: ForkSource, table: BlockTable) -> bool:
        """Give an empty table all but the last of the held tokens: full blocks are shared, a
        partial one is copied. Without room for the block that is written next: False, and nothing
        changes."""
        assert not table.blocks, "a table is forked once"
        num_full, num_partial = divmod(source.num_tokens - 1, self.block_size)
        if self.pool.num_available < 1:
            return False
        table.blocks = source.blocks[:num_full]
        for block in table.blocks:
            self.pool.share(block)
        own = self.pool.allocate(1)[0]
        if num_partial:
            self._device_to_device.append((source.blocks[num_full], own))
        table.blocks.append(own)
        return True

    def drop(self, source: ForkSource) -> None:
        """End a ForkSource; its blocks stay until the step under construction is complete."""
        self._release_after_step.extend(reversed(source.blocks))
        source.blocks = []
        if not self._device_to_device:
            self._release_dropped()

    @property
    def has_copies(self) -> bool:
        """Whether blocks wait for a step that copies them to host memory."""
        return any(tier.has_copies for tier in self.tiers)

    def take_copies(self) -> BlockCopies:
        """The copies to do before the step that is now complete."""
        copies = NO_COPIES
        is_busy = self.host.busy or (self.bounded and any(tier.busy for tier in self.tiers))
        if is_busy or self._device_to_device:
            more = [BlockCopies(*group.host.take_copies()) for group in self.bounded]
            more = more if any(group != NO_COPIES for group in more) else []
            copies = BlockCopies(*self.host.take_copies(), self._device_to_device, more)
            self._device_to_device = []
        if self._release_after_step:
            self._release_dropped()
        return copies

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Withhold blocks that a peer might still write to."""
        self.pool.quarantine(blocks)

    def release_quarantine(self, blocks: Iterable[int]) -> None:
        """No peer can write to these blocks any more."""
        self.pool.release_quarantine(blocks)

    def clear_cache(self) -> None:
        """Forget every cached prefix: a step failed, so the content of blocks is unknown."""
        self.prefix.clear()
        for group in self.bounded:
            group.clear()

    def check(self) -> None:
        """Raise AssertionError if a block is leaked or owned twice; for tests and idle time."""
        self.pool.check()
        for group in self.bounded:
            group.check()
        self.host.check()

    def _release_dropped(self) -> None:
        self.pool.release(self._release_after_step)
        self._release_after_step = []

    def _make_findable(self, table: BlockTable, end: int) -> None:
        """Bounded groups keep what resuming after the first `end` committed blocks takes."""
        least = min(group.needed(end).start for group in self.bounded)
        entries = self.prefix.last_entries(table, table.num_committed - least)
        more = table.num_committed - end
        make_findable(self.bounded, table, entries[: max(0, len(entries) - more)], end)

    def _on_drop(self, entry: CacheEntry) -> None:
        for group in self.bounded:
            group.forget(entry)
