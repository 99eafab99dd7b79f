"""Host side of the reference attention: which rows of the pool, and of q, each product needs.

Pure numpy. The pool is a matrix with one row per (slot, kv head), q one with a row per (token,
head). Letters: R sequences of a group, N tiles, Q query tokens, G query heads per kv head, H kv
heads, W = widest sequence of a group in whole tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch

# Keys are read and multiplied in tiles of this many tokens, for every block size. The size is
# fixed, so a sequence is cut the same way in every batch.
TILE = 64
# Rows with at most this many query tokens run together.
MAX_SHORT = 8
# A group is split by length when padding it to its longest would exceed either of these.
MAX_WASTE = 3
MAX_SCORES = 1 << 23
# Scores that a prefill chunk may hold at once.
MAX_CHUNK_SCORES = 1 << 23
MAX_CHUNK = 512


@dataclass(slots=True)
class ShortGroup:
    """Rows with few query tokens, computed together."""

    num_rows: int
    num_queries: int  # Q, the most query tokens of a row; shorter rows repeat their last one
    num_tiles: int  # N
    max_tiles: int  # W / TILE
    kv_rows: np.ndarray  # [N * H * TILE] rows of the pool
    query_rows: np.ndarray  # [N * H * Q * G] rows of q
    spread: np.ndarray | None  # [R * H * Q * G * max_tiles] score rows; None: one tile per row
    collect: np.ndarray | None  # [N * H * Q * G] rows of the spread scores
    row_of_tile: np.ndarray  # [N]
    limits: np.ndarray  # [R, Q]: the last key each query sees, counted from its row's first tile
    firsts: np.ndarray | None  # [R, Q]: the first one, likewise; None: the first of all
    output_rows: np.ndarray | None  # [R * H * Q * G] rows of the output; None: all of it, in order


@dataclass(slots=True)
class Chunk:
    """Consecutive query tokens of one sequence."""

    query_rows: np.ndarray  # [H * G * num_queries] rows of q, and of the output
    num_queries: int
    num_keys: int  # the last query sees all of them, the one before it all but one, and so on
    first_key: int  # the first that a query of the chunk sees
    # [num_queries]: the first that each sees, counted from that; None: all see the same first one
    firsts: np.ndarray | None


@dataclass(slots=True)
class LongRow:
    """A sequence with many query tokens."""

    kv_rows: np.ndarray  # [H, num_keys]
    chunks: list[Chunk]


@dataclass(slots=True)
class RaggedGroup:
    """Rows with few query tokens, each (token, head) with its own list of pool rows; no padding."""

    offsets: np.ndarray  # [tokens * num_heads + 1] int64: where each list starts
    pool_rows: np.ndarray  # [offsets[-1]] int64
    output_rows: np.ndarray | None  # [tokens * num_heads] rows of q and output; None: all, in order


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts, and how the pool is cut."""

    num_heads: int
    num_kv_heads: int
    block_size: int
    window: int = 0  # keys that a query sees, its own included; 0: all
    chunk: int = 0  # a query sees the keys of its chunk of so many tokens alone; 0: all

    def first_seen(self, positions: np.ndarray) -> np.ndarray:
        """The first key that the queries at these positions see. What lies in front of the first
        that any token of a step sees may be another sequence's, or nothing."""
        first: np.ndarray = positions // self.chunk * self.chunk if self.chunk else positions * 0
        return np.maximum(positions - self.window + 1, 0) if self.window else first

    @property
    def is_bounded(self) -> bool:
        """Whether a query may not see all keys before it."""
        return bool(self.window or self.chunk)

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads


def plan_longs(batch: AttentionBatch, heads: Heads) -> list[LongRow]:
    """The sequences that run one by one."""
    starts, lengths = _extents(batch)
    return [
        _plan_long(batch, heads, int(starts[row]), int(lengths[row]), int(row))
        for row in np.flatnonzero(lengths > MAX_SHORT)
    ]


def plan_ragged(batch: AttentionBatch, heads: Heads) -> RaggedGroup | None:
    """All other sequences, as lists of the pool rows that each query reads."""
    starts, lengths = _extents(batch)
    rows = np.flatnonzero((lengths > 0) & (lengths <= MAX_SHORT))
    if not len(rows):
        return None
    # One entry per query token, then one per position that it sees.
    row = np.repeat(rows, lengths[rows])
    step = np.arange(len(row)) - np.repeat(np.cumsum(lengths[rows]) - lengths[rows], lengths[rows])
    own = batch.seq_lens[row].astype(np.int64) - lengths[row] + step
    first = heads.first_seen(own)
    seen = own + 1 - first
    start = np.cumsum(seen) - seen
    positions = np.arange(int(seen.sum())) - np.repeat(start - first, seen)
    slots = _slots(batch.block_tables, np.repeat(row, seen), positions, heads.block_size)
    # The same for every head. The lists of one head are consecutive, so heads of a group find the
    # keys that the previous head read still in the processor's cache.
    counts = np.repeat(seen, heads.num_heads)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    where = np.repeat(np.repeat(start, heads.num_heads) - offsets[:-1], counts)
    where += np.arange(int(offsets[-1]))
    kv_head = np.tile(np.arange(heads.num_heads) // heads.group, len(row))
    pool_rows = (slots * heads.num_kv_heads)[where] + np.repeat(kv_head, counts)
    tokens = starts[row] + step
    output_rows = None
    if len(row) != batch.num_tokens:
        output_rows = (tokens[:, None] * heads.num_heads + np.arange(heads.num_heads)).reshape(-1)
    return RaggedGroup(offsets=offsets, pool_rows=pool_rows, output_rows=output_rows)


def plan_tiles(batch: AttentionBatch, heads: Heads) -> list[ShortGroup]:
    """All other sequences, as tiles of keys."""
    starts, lengths = _extents(batch)
    decodes = np.flatnonzero(lengths == 1)
    shorts = np.flatnonzero((lengths > 1) & (lengths <= MAX_SHORT))
    # Tokens of each row from the tile on in which the first key lies that it sees.
    spans = batch.seq_lens - heads.first_seen(batch.seq_lens - lengths) // TILE * TILE
    return [
        _plan_group(batch, heads, starts, lengths, part)
        for rows in (decodes, shorts)
        if len(rows)
        for part in _similar(rows, spans, heads.num_heads)
    ]


def _extents(batch: AttentionBatch) -> tuple[np.ndarray, np.ndarray]:
    """First query token and number of query tokens of each row."""
    starts = batch.cu_seqlens_q.astype(np.int64)
    return starts[:-1], np.diff(starts)


def _similar(rows: np.ndarray, seq_lens: np.ndarray, num_heads: int) -> Iterator[np.ndarray]:
    """The rows, in parts that waste little when padded to their longest row."""
    tiles = -(-seq_lens[rows].astype(np.int64) // TILE)
    padded = len(rows) * int(tiles.max())
    if len(rows) == 1 or (
        padded <= MAX_WASTE * int(tiles.sum()) and padded * TILE * num_heads <= MAX_SCORES
    ):
        yield rows
        return
    order = np.argsort(tiles, kind="stable")
    half = len(rows) // 2
    yield from _similar(rows[order[:half]], seq_lens, num_heads)
    yield from _similar(rows[order[half:]], seq_lens, num_heads)


def _plan_group(
    batch: AttentionBatch, heads: Heads, starts: np.ndarray, lengths: np.ndarray, rows: np.ndarray
) -> ShortGroup:
    seq_lens = batch.seq_lens[rows].astype(np.int64)
    first_keys = heads.first_seen(seq_lens - lengths[rows])
    base = first_keys // TILE * TILE
    tiles = -(-(seq_lens - base) // TILE)
    num_tiles, widest = int(tiles.sum()), int(tiles.max())
    num_queries = int(lengths[rows].max())
    group, kv_heads = heads.group, heads.num_kv_heads
    per_tile = heads.num_heads * num_queries

    first = np.cumsum(tiles) - tiles
    row_of_tile = np.repeat(np.arange(len(rows)), tiles)
    tile_in_row = np.arange(num_tiles) - first[row_of_tile]
    # Positions after the end repeat the last token, those in front of what is seen the first one:
    # masked, and never memory of others.
    positions = np.clip(
        (base[row_of_tile] + tile_in_row * TILE)[:, None] + np.arange(TILE),
        first_keys[row_of_tile][:, None],
        (seq_lens - 1)[row_of_tile][:, None],
    )
    slots = _slots(batch.block_tables[rows], row_of_tile[:, None], positions, heads.block_size)
    kv_rows = slots[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]

    step = np.minimum(np.arange(num_queries), (lengths[rows] - 1)[:, None])  # [R, Q]
    tokens = starts[rows][:, None] + step
    head = np.arange(kv_heads)[:, None, None] * group + np.arange(group)  # [H, 1, G]
    row_queries = (tokens[:, None, :, None] * heads.num_heads + head).reshape(len(rows), per_tile)

    spread = collect = None
    if widest > 1:
        tile = first[:, None] + np.minimum(np.arange(widest), (tiles - 1)[:, None])  # [R, widest]
        score = np.arange(per_tile)[:, None]
        spread = (tile[:, None, :] * per_tile + score).reshape(-1)
        row = row_of_tile[:, None] * per_tile + np.arange(per_tile)
        collect = (row * widest + tile_in_row[:, None]).reshape(-1)
    own = (seq_lens - lengths[rows])[:, None] + step
    alone = len(rows) == batch.num_tokens and num_queries == 1
    in_order = alone and bool((tokens[:, 0] == np.arange(len(rows))).all())
    return ShortGroup(
        num_rows=len(rows),
        num_queries=num_queries,
        num_tiles=num_tiles,
        max_tiles=widest,
        kv_rows=kv_rows.reshape(-1),
        query_rows=row_queries[row_of_tile].reshape(-1),
        spread=spread,
        collect=collect,
        row_of_tile=row_of_tile,
        limits=own - base[:, None],
        firsts=heads.first_seen(own) - base[:, None] if heads.is_bounded else None,
        output_rows=None if in_order else row_queries.reshape(-1),
    )


def _plan_long(batch: AttentionBatch, heads: Heads, start: int, length: int, row: int) -> LongRow:
    seq_len = int(batch.seq_lens[row])
    begin_at = seq_len - length  # position of the first query
    base = int(heads.first_seen(np.array(begin_at)))
    num_keys = seq_len - base
    slots = _slots(batch.block_tables, row, np.arange(base, seq_len), heads.block_size)
    kv_heads = np.arange(heads.num_kv_heads)[:, None]
    chunk = min(MAX_CHUNK, max(1, MAX_CHUNK_SCORES // (num_keys * heads.num_heads)))
    head = np.arange(heads.num_heads)[:, None]
    chunks = []
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        tokens = np.arange(start + begin, start + end)
        seen = heads.first_seen(np.arange(begin_at + begin, begin_at + end)) - base
        chunks.append(
            Chunk(
                query_rows=(tokens * heads.num_heads + head).reshape(-1),
                num_queries=end - begin,
                num_keys=num_keys - length + end,
                first_key=int(seen[0]),
                firsts=seen - seen[0] if heads.is_bounded else None,
            )
        )
    return LongRow(kv_rows=slots * heads.num_kv_heads + kv_heads, chunks=chunks)


def _slots(
    tables: np.ndarray, rows: np.ndarray | int, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """Slot of each position of each row."""
    blocks, offsets = np.divmod(positions, block_size)
    slots: np.ndarray = tables[rows, blocks].astype(np.int64) * block_size + offsets
    return slots
