"""The prefix cache: which full blocks hold which tokens, found by a chained hash.

A block's key is SHA-256 over canonical bytes of its parent's key and its own tokens. The first
parent is made of the model's identity, the request's cache_salt and its adapter. Where vectors
stand in the places of tokens (SequenceExtras.embeddings), the key also covers what they are made
from. With `lookahead`, it also covers that many tokens after the block, because a drafter's cache
entries in the block depend on them. A key alone is never trusted: everything it covers is compared
on every hit, so even a forced collision cannot mix two prefixes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from fastdeploy_core.types import EmbeddedSpan, SequenceExtras

from .blocks import BlockPool
from .groups import GroupTable
from .host_tier import HostTier

HashFunction = Callable[[bytes], bytes]
Scope = tuple[str, str, str]  # cache_salt, adapter, routes: blocks are shared within one alone
NO_EXTRAS = SequenceExtras()


def sha256(data: bytes) -> bytes:
    """The hash used in production; tests replace it to force collisions."""
    return hashlib.sha256(data).digest()


def canonical(*texts: str) -> bytes:
    """An injective encoding of several texts as bytes: each text after its length."""
    parts = [text.encode("utf-8", "surrogatepass") for text in texts]
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def _pack_embeddings(spans: Iterable[EmbeddedSpan], first: int, end: int) -> bytes:
    """What stands in the places of the tokens from `first` to `end`: of each span that overlaps
    them its digest, the item's first row among them and the place of that row."""
    parts = []
    for span in spans:
        start = max(span.start, first)
        count = min(span.start + span.count, end) - start
        if count > 0:
            row = span.first_row + start - span.start
            parts.append(struct.pack("<IQQQ", len(span.digest), row, start - first, count))
            parts.append(span.digest)
    return b"".join(parts)


class CacheEntry:
    """One full block of tokens after its parent; on the device, in host memory, or both."""

    __slots__ = ("block", "key", "parent", "scope", "tokens")

    def __init__(self, key: bytes, parent: CacheEntry | None, scope: Scope, tokens: bytes) -> None:
        self.key = key
        self.parent = parent
        self.scope = scope
        self.tokens = tokens
        self.block: int | None = None


class BlockTable:
    """The blocks of one sequence in the order of its tokens, and its state in the prefix cache.

    `keys` and `packed` describe full blocks of tokens and outlive the blocks themselves, so a
    preempted sequence is not hashed again. `more` are the blocks of bounded groups (groups.py).
    """

    def __init__(self, scope: Scope, root: bytes, embeddings: Sequence[EmbeddedSpan] = ()) -> None:
        self.scope = scope
        self.root = root
        self.embeddings = embeddings
        self.blocks: list[int] = []
        self.more: list[GroupTable] = []
        self.anchors: tuple[int, ...] = ()  # blocks after which others may resume
        self.num_passed = 0  # blocks of tokens that are certain
        self.keys: list[bytes] = []
        self.packed: list[bytes] = []
        self.num_committed = 0  # leading blocks that were committed to the prefix cache
        self.tail: CacheEntry | None = None  # cache entry of the last committed block
        self.is_cacheable = True  # False once its chain cannot be continued

    def interleaved(self, first: int = 0) -> list[int]:
        """The blocks of all groups, from that one on, as messages have them: of each block of
        tokens the first group's, then the others' in their order."""
        if not self.more:
            return self.blocks[first:]
        tables = (self.blocks[first:], *(own.blocks[first:] for own in self.more))
        return [block for column in zip(*tables, strict=True) for block in column]

    def reset(self) -> None:
        """Forget the blocks; keys stay."""
        self.blocks = []
        self.more = [GroupTable() for _ in self.more]
        self.num_committed = self.num_passed = 0
        self.tail = None
        self.is_cacheable = True


class PrefixCache:
    """Finds and remembers full blocks. Reference counts belong to the pool."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        model_identity: str,
        host: HostTier,
        hash_function: HashFunction = sha256,
        lookahead: int = 0,
    ) -> None:
        self._pool = pool
        self._host = host
        self._hash = hash_function
        self._identity = model_identity
        self._pack = struct.Struct(f"<{block_size + lookahead}I").pack
        self._block_size = block_size
        self._lookahead = lookahead
        self.on_drop: Callable[[CacheEntry], None] | None = None  # an entry is no more
        # Is told whether a block can be hit from now on; None: no block can.
        self.on_change: Callable[[CacheEntry | None, bool], None] | None = None
        self._by_key: dict[bytes, CacheEntry] = {}
        self._by_block: dict[int, CacheEntry] = {}
        self._root = lru_cache(maxsize=256)(self._make_root)
        pool.on_evict = self._on_evict
        host.on_drop = self._on_host_drop

    def __len__(self) -> int:
        return len(self._by_key)

    def new_table(self, cache_salt: str, extras: SequenceExtras | None = None) -> BlockTable:
        """An empty table that shares blocks only with requests of the same scope."""
        extras = extras or NO_EXTRAS
        scope = cache_salt, extras.adapter, extras.routes
        return BlockTable(scope, self._root(scope), extras.embeddings)

    def _make_root(self, scope: Scope) -> bytes:
        """The parent of first blocks; without adapter and routes that of their salt alone."""
        given = scope[: 3 if scope[2] else 2 if scope[1] else 1]
        return self._hash(canonical(self._identity, *given))

    def num_keyed(self, num_known: int) -> int:
        """Leading blocks that have a key when num_known tokens are known."""
        return max(0, num_known - self._lookahead) // self._block_size

    def extend_keys(self, table: BlockTable, token_ids: Sequence[int], num_blocks: int) -> None:
        """Hash the table's tokens up to num_blocks full blocks, at most num_keyed(len(token_ids)).
        Blocks hashed before keep their keys."""
        keys, size, more = table.keys, self._block_size, self._lookahead
        parent = keys[-1] if keys else table.root
        for index in range(len(keys), num_blocks):
            first, end = index * size, (index + 1) * size + more
            packed = self._pack(*token_ids[first:end])
            if table.embeddings:
                packed += _pack_embeddings(table.embeddings, first, end)
            parent = self._hash(parent + packed)
            keys.append(parent)
            table.packed.append(packed)

    def match(self, table: BlockTable, num_blocks: int) -> list[CacheEntry]:
        """The longest cached run of the table's first num_blocks blocks, verified."""
        found: list[CacheEntry] = []
        parent: CacheEntry | None = None
        for key, packed in zip(table.keys[:num_blocks], table.packed, strict=False):
            entry = self._by_key.get(key)
            if entry is None or not self._is_same(entry, parent, table.scope, packed):
                break
            found.append(entry)
            parent = entry
        return found

    def commit(self, table: BlockTable, num_blocks: int) -> None:
        """The table's first num_blocks blocks are computed: remember those not seen yet."""
        for index in range(table.num_committed, num_blocks):
            if not table.is_cacheable:
                return
            entry = self._insert(table, index)
            if entry is None:
                table.is_cacheable = False
                return
            table.tail = entry
            table.num_committed = index + 1

    def last_entries(self, table: BlockTable, count: int) -> list[CacheEntry]:
        """Of the last `count` committed blocks, as far as they are still known without a gap."""
        found: list[CacheEntry] = []
        entry = table.tail
        while entry is not None and len(found) < count and self._by_key.get(entry.key) is entry:
            found.append(entry)
            entry = entry.parent
        return found[::-1]

    def adopt(self, table: BlockTable, first: int, host_blocks: Sequence[int]) -> int:
        """The table's blocks from number `first` on have come into these reserved host blocks.
        Returns how many are new to the cache; the others are known already, or what stands before
        them is known no more."""
        found = self.match(table, first + len(host_blocks))
        parent, num_new = found[-1] if found else None, 0
        for index in range(max(first, len(found)), first + len(host_blocks)):
            entry = self._by_key.get(table.keys[index])
            if entry is not None and not self._is_alive(entry.parent):
                self._drop(entry)  # unreachable: the block before it was evicted first
                entry = None
            if len(found) < first or entry is not None:
                break
            entry = CacheEntry(table.keys[index], parent, table.scope, table.packed[index])
            self._by_key[entry.key] = parent = entry
            self._host.adopt(entry, host_blocks[index - first])
            if self.on_change is not None:
                self.on_change(entry, True)
            num_new += 1
        return num_new

    def attach(self, entry: CacheEntry, block: int) -> None:
        """The entry's content will also be in this device block."""
        entry.block = block
        self._by_block[block] = entry
        self._pool.mark_cached(block)

    def clear(self) -> None:
        """Forget everything, on the device and in host memory."""
        for block in list(self._by_block):
            self._pool.forget_cached(block)
        for entry in self._by_key.values():
            entry.block = None
        self._by_key.clear()
        self._by_block.clear()
        self._host.clear()
        if self.on_change is not None:
            self.on_change(None, False)

    def _insert(self, table: BlockTable, index: int) -> CacheEntry | None:
        """The cache entry of this block from now on; None if another entry has its key."""
        key, packed, parent = table.keys[index], table.packed[index], table.tail
        block = table.blocks[index]
        if index > 0 and (parent is None or not self._is_alive(parent)):
            return None
        entry = self._by_key.get(key)
        if entry is not None and not self._is_same(entry, parent, table.scope, packed):
            if self._is_alive(entry.parent):
                return None
            self._drop(entry)  # unreachable: the block before it was evicted first
            entry = None
        if self._pool.is_quarantined(block):
            return entry
        if entry is None:
            entry = CacheEntry(key, parent, table.scope, packed)
            self._by_key[key] = entry
            self.attach(entry, block)
            if self.on_change is not None:
                self.on_change(entry, True)
            if self._host.writes_through:
                self._host.write_through(entry, block)
        elif entry.block is None:
            self.attach(entry, block)
        return entry

    def _is_alive(self, entry: CacheEntry | None) -> bool:
        """Whether the content still exists somewhere; what stands before a first block does."""
        return entry is None or entry.block is not None or entry in self._host

    @staticmethod
    def _is_same(entry: CacheEntry, parent: CacheEntry | None, scope: Scope, packed: bytes) -> bool:
        return entry.parent is parent and entry.tokens == packed and entry.scope == scope

    def _on_evict(self, block: int, is_intact: bool) -> None:
        entry = self._by_block.pop(block)
        if is_intact and self._host.num_blocks:
            self._host.save(entry, block)
        entry.block = None
        if entry not in self._host:
            self._remove(entry)

    def _on_host_drop(self, entry: CacheEntry) -> None:
        if not self._is_alive(entry):
            self._remove(entry)

    def _drop(self, entry: CacheEntry) -> None:
        if entry.block is not None:
            del self._by_block[entry.block]
            self._pool.forget_cached(entry.block)
            entry.block = None
        self._host.forget(entry)
        self._remove(entry)

    def _remove(self, entry: CacheEntry) -> None:
        del self._by_key[entry.key]
        if self.on_drop is not None:
            self.on_drop(entry)
        if self.on_change is not None:
            self.on_change(entry, False)
