"""How a step's work is cut, on the device: decode rows into splits, prefill rows into tiles.

A decode row's cached tokens are divided among several programs. How many, `cut_decodes` decides on
the device from the lengths of this very step, so that a captured graph stays balanced for
all lengths: all splits are about equally long, and there are no more than the grid has programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from fd_cuda.kernels.common import cdiv, has_pdl, pad2

from .common import first_key_of

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch

# Of one work item; kernels read them by these numbers.
ROW, TILE_BEGIN, TILE_END, SPLIT, NUM_SPLITS, CONTEXT, FIRST_TOKEN, NUM_TOKENS = range(8)
ITEM = 8
TILE_WORDS = 8  # of a prefill tile, six of them used
_ITEMS_PER_PROGRAM, _SHARES_PER_PROGRAM, _TILES_PER_PROGRAM = 64, 16, 16
# A row and head in a line of shares counts as so many tiles at least: beginning and ending one
# takes as long as two or three, and a block that got all rows that stand in for others would be the
# last by far.
_LEAST_IN_LINE = 4


@triton.jit
def _splits(tiles, limit):
    """Number of splits of at most `limit` tiles each, without empty ones; 0 for rows without
    tiles."""
    wanted = tl.maximum(tl.cdiv(tiles, limit), 1)
    return tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, wanted), 1))


@triton.jit(do_not_specialize=["num_seqs", "target", "num_items", "num_counters", "max_tokens"])
def cut_decodes(
    seq_lens,
    cu_seqlens,
    items,
    counters,
    num_seqs,
    target,
    num_items,
    num_counters,
    max_tokens,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    NEW_IN_CACHE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write work items for rows of 1 to max_tokens tokens, and zero the counters of arrivals.
    With a WINDOW or CHUNK, rows begin with the tile of the first key that they need.

    NEW_IN_CACHE: this step's tokens are read from the cache like all others (latent attention), and
    not from the kernel's arguments.
    """
    first, fed, cached, tiles = _tiles_of_rows(
        seq_lens, cu_seqlens, num_seqs, max_tokens, TILE, 1, NEW_IN_CACHE, WINDOW, CHUNK, ROWS
    )
    # Rounding up costs at most one item a row, so these always fit into target + num_seqs items.
    limit = tl.maximum(tl.cdiv(tl.sum(tiles), target), MIN_TILES)
    longest = tl.max(tiles)
    limit = tl.maximum(limit, tl.cdiv(longest, MAX_SPLITS))
    # Rows of one length all round up alike: rather longer splits than a second wave of them.
    while (tl.sum(_splits(tiles, limit)) > target + target // 8) & (limit < longest):
        limit += tl.cdiv(limit, 16)
    splits = _splits(tiles, limit)
    ends = tl.cumsum(splits, 0)

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    before = ends[None, :] <= item[:, None]
    row = tl.sum(before.to(tl.int32), 1)
    split = item - tl.sum(tl.where(before, splits[None, :], 0), 1)
    known = row < num_seqs
    first = tl.load(cu_seqlens + row, mask=known, other=0)
    fed = tl.load(cu_seqlens + row + 1, mask=known, other=0) - first
    length = tl.load(seq_lens + row, mask=known, other=0)
    cached = length if NEW_IN_CACHE else tl.maximum(length - fed, 0)
    skipped = first_key_of(cached, WINDOW, CHUNK) // TILE
    tiles = tl.maximum(tl.cdiv(cached, TILE) - skipped, 1)
    num_splits = _splits(tiles, limit)
    each = tl.cdiv(tiles, num_splits)
    begin = split * each
    out = items + item * SIZE
    write = item < num_items
    tl.store(out + 0, tl.where(known, row, -1), mask=write)
    tl.store(out + 1, skipped + begin, mask=write)
    tl.store(out + 2, skipped + tl.minimum(begin + each, tiles), mask=write)
    tl.store(out + 3, split, mask=write)
    tl.store(out + 4, num_splits, mask=write)
    tl.store(out + 5, cached, mask=write)
    tl.store(out + 6, first, mask=write)
    tl.store(out + 7, fed, mask=write)
    _publish(split, counters, num_counters, ROWS, PDL)


@triton.jit(do_not_specialize=["num_seqs", "num_blocks", "num_counters", "max_tokens"])
def cut_stream(
    seq_lens,
    cu_seqlens,
    items,
    counters,
    num_seqs,
    num_heads,
    num_blocks,
    num_counters,
    max_tokens,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """For kernels/native/stream_attention.cu: an equal share of all rows' and heads' tiles for each
    block (first row, first tile, end, tiles in all), then what it is to know of each row, by the
    last program.

    Cutting a row costs about a third of its time. Where there is a block for every row and head and
    none is much longer than the others, each block gets one of them, and 0 in the place of all
    tiles says so."""
    first, fed, cached, tiles = _tiles_of_rows(
        seq_lens, cu_seqlens, num_seqs, max_tokens, TILE, LEAST, False, 0, 0, ROWS
    )
    ends = tl.cumsum(tiles, 0)
    written = ends
    if tl.program_id(0) == tl.num_programs(0) - 1:
        rows = tl.arange(0, ROWS)
        of_row = items + (num_blocks + rows) * SIZE
        is_row = rows < num_seqs
        tl.store(of_row + 0, ends - tiles, mask=is_row)
        tl.store(of_row + 1, tiles, mask=is_row)
        tl.store(of_row + 2, cached, mask=is_row)
        tl.store(of_row + 3, first, mask=is_row)
        tl.store(of_row + 4, fed, mask=is_row)
    else:
        total = tl.sum(tiles) * num_heads
        rows, block = tl.arange(0, ROWS), tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
        # Where shares are whole rows or whole fractions of rows, they begin and end where these do.
        begin = (block.to(tl.int64) * total // num_blocks).to(tl.int32)
        end = ((block + 1).to(tl.int64) * total // num_blocks).to(tl.int32)
        row = tl.sum(((ends * num_heads)[None, :] <= begin[:, None]).to(tl.int32), 1)
        fair = tl.sum(tiles) // num_seqs
        if (num_blocks == num_seqs * num_heads) & (tl.max(tiles) <= fair + fair // 4):
            row = block // num_heads
            own = rows[None, :] == row[:, None]
            length = tl.sum(tl.where(own, tiles[None, :], 0), 1)
            begin = tl.sum(tl.where(own, (ends - tiles)[None, :], 0), 1) * num_heads
            begin += block % num_heads * length
            end = begin + length
            total = total * 0  # of its own type
        share = items + block * SIZE
        is_block = block < num_blocks
        tl.store(share + 0, row, mask=is_block)
        tl.store(share + 1, begin, mask=is_block)
        tl.store(share + 2, end, mask=is_block)
        tl.store(share + 3, total, mask=is_block)
    _publish(written, counters, num_counters, ROWS, PDL)


@triton.jit
def _tiles_of_rows(
    seq_lens, cu_seqlens, num_seqs, max_tokens,
    TILE: tl.constexpr, LEAST: tl.constexpr, NEW_IN_CACHE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of each row: its first token, tokens it feeds and tokens in the cache; tiles, at least LEAST,
    0 for rows of more than max_tokens tokens."""
    rows = tl.arange(0, ROWS)
    inside = rows < num_seqs
    first = tl.load(cu_seqlens + rows, mask=inside, other=0)
    fed = tl.load(cu_seqlens + rows + 1, mask=inside, other=0) - first
    lengths = tl.load(seq_lens + rows, mask=inside, other=0)
    cached = lengths if NEW_IN_CACHE else tl.maximum(lengths - fed, 0)
    mine = inside & (fed > 0) & (fed <= max_tokens)
    tiles = tl.cdiv(cached, TILE) - first_key_of(cached, WINDOW, CHUNK) // TILE
    return first, fed, cached, tl.where(mine, tl.maximum(tiles, LEAST), 0)


@triton.jit
def _publish(written, counters, num_counters, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Zero the counters; then make all stores visible."""
    if tl.program_id(0) == 0:
        for start in range(0, num_counters, ROWS):
            counter = start + tl.arange(0, ROWS)
            tl.store(counters + counter, 0, mask=counter < num_counters)
    _show(written, PDL)


@triton.jit
def _show(written, PDL: tl.constexpr):
    """Make all stores visible, those that `written` stands for too."""
    if PDL:
        # Kernels after read the items before they wait for those before them (decode.py), so they
        # must find them: this one lets none start early, and makes its stores visible to all.
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, $1;", "=r,r", [written], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _tiles_from(level, before, counts):
    """How many tiles of all rows lie on that level and above, for each of some levels."""
    above = (before + counts)[None, :] - level[:, None]
    return tl.sum(tl.minimum(tl.maximum(above, 0), counts[None, :]), 1)


@triton.jit(do_not_specialize=["num_seqs", "num_tiles"])
def cut_prompts(
    seq_lens, cu_seqlens, tiles, num_seqs, num_tiles,
    SHORTEST: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of rows of more than SHORTEST tokens: the row, the tile's first token within it, the
    row's first token of the step, tokens it feeds, tokens in the cache before, how many tiles there
    are. With KEYS, as items of kernels that find the step's own tokens in the cache, too: one split
    each of tiles of so many keys.

    The longest first, by how many times TOKENS stand before a tile: late tokens of long rows see
    most keys, and the last to start should be short. Tiles after the last feed no tokens.
    """
    rows = tl.arange(0, ROWS)
    inside = rows < num_seqs
    fed = tl.load(cu_seqlens + rows + 1, mask=inside, other=0)
    fed -= tl.load(cu_seqlens + rows, mask=inside, other=0)
    before = tl.maximum(tl.load(seq_lens + rows, mask=inside, other=0) - fed, 0) // TOKENS
    counts = tl.where(fed > SHORTEST, tl.cdiv(fed, TOKENS), 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    # The largest level that has so many tiles on it and above that this one is among them.
    level = tl.zeros([TILES], tl.int32)
    step = tl.full([TILES], 1 << 20, tl.int32)  # more tiles no sequence has
    for _ in range(21):
        higher = level + step
        level = tl.where(_tiles_from(higher, before, counts) > tile, higher, level)
        step = step // 2
    nth = tile - _tiles_from(level + 1, before, counts)
    from_row = (before + counts)[None, :] - level[:, None]
    has_one = (from_row > 0) & (from_row <= counts[None, :])
    row = tl.sum((tl.cumsum(has_one.to(tl.int32), 1) <= nth[:, None]).to(tl.int32), 1)
    known = row < num_seqs
    row = tl.where(known, row, 0)
    first = tl.load(cu_seqlens + row)
    fed = tl.where(known, tl.load(cu_seqlens + row + 1) - first, 0)
    context = tl.where(known, tl.maximum(tl.load(seq_lens + row) - fed, 0), 0)
    begin = tl.where(known, (level - context // TOKENS) * TOKENS, 0)
    out = tiles + tile * SIZE
    write = tile < num_tiles
    if KEYS:
        count = tl.minimum(fed - begin, TOKENS)
        end = context + begin + count
        tl.store(out + 0, tl.where(known, row, -1), mask=write)
        tl.store(out + 1, 0, mask=write)
        tl.store(out + 2, tl.maximum(tl.cdiv(end, KEYS), 1), mask=write)
        tl.store(out + 3, 0, mask=write)
        tl.store(out + 4, 1, mask=write)
        tl.store(out + 5, end, mask=write)
        tl.store(out + 6, first + begin, mask=write)
        tl.store(out + 7, count, mask=write)
        _show(count, PDL)
    else:
        tl.store(out + 0, row, mask=write)
        tl.store(out + 1, begin, mask=write)
        tl.store(out + 2, first, mask=write)
        tl.store(out + 3, fed, mask=write)
        tl.store(out + 4, context, mask=write)
        tl.store(out + 5, tl.sum(counts), mask=write)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """How decode rows are cut and computed; see tuning.py."""

    tile: int
    min_tiles: int  # a split reads at least so many
    max_splits: int
    target: int  # so many splits in all, if the rows are long enough
    num_warps: int
    num_stages: int

    def num_items(self, num_seqs: int) -> int:
        """The most splits that there can be."""
        return num_seqs + self.target


def decode_items(
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_seqs: int,
    num_counters: int,
    max_tokens: int,
    shape: DecodeShape,
    *,
    new_in_cache: bool,
    window: int = 0,
    chunk: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(items [num_items, ITEM] int32, counters [num_counters] int32), filled by one small
    kernel."""
    num_items = shape.num_items(num_seqs)
    return _cut(
        cut_decodes, cdiv(num_items, _ITEMS_PER_PROGRAM), num_items, num_counters,
        (seq_lens, cu_seqlens), (num_seqs, shape.target, num_items, num_counters, max_tokens),
        TILE=shape.tile, MIN_TILES=shape.min_tiles, MAX_SPLITS=shape.max_splits,
        NEW_IN_CACHE=new_in_cache, WINDOW=window, CHUNK=chunk, ITEMS=_ITEMS_PER_PROGRAM,
    )  # fmt: skip


def _cut(
    kernel: Any,
    programs: int,
    num_items: int,
    num_counters: int,
    lengths: tuple[torch.Tensor, torch.Tensor],
    numbers: tuple[int, ...],
    **sizes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel writes; `numbers` begin with that of rows."""
    items = torch.empty((num_items, ITEM), dtype=torch.int32, device=lengths[0].device)
    counters = torch.empty(num_counters, dtype=torch.int32, device=lengths[0].device)
    rows = max(16, pad2(numbers[0]))
    warps = 4 if rows <= 256 else 8
    kernel[(programs,)](
        *(*lengths, items, counters, *numbers),
        **sizes, ROWS=rows, SIZE=ITEM, PDL=has_pdl(), num_warps=warps,
    )  # fmt: skip
    return items, counters


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How stream_attention.cu is specialized."""

    tile: int  # shares are cut at multiples of so many tokens
    warps: int
    units: int  # times 16 tokens a warp reads at once
    stages: int  # so many reads of a warp stay in shared memory, all but one on their way
    occupancy: int  # blocks that a multiprocessor must be able to hold
    num_blocks: int


def stream_items(
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_seqs: int,
    num_heads: int,
    max_tokens: int,
    shape: StreamShape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(items [num_blocks + num_seqs, ITEM], counters [num_seqs * num_heads]) of cut_stream."""
    blocks, num_counters = shape.num_blocks, num_seqs * num_heads
    return _cut(
        cut_stream, cdiv(blocks, _SHARES_PER_PROGRAM) + 1, blocks + num_seqs, num_counters,
        (seq_lens, cu_seqlens), (num_seqs, num_heads, blocks, num_counters, max_tokens),
        TILE=shape.tile, LEAST=_LEAST_IN_LINE, ITEMS=_SHARES_PER_PROGRAM,
    )  # fmt: skip


def split_parts(
    items: torch.Tensor, rows_per_item: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where splits leave their sums, maxima and totals."""
    rows = items.shape[0] * rows_per_item

    def part(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=items.device)

    return part(rows * width), part(rows), part(rows)


def prompt_tiles(
    batch: AttentionBatch, shortest: int, tokens_per_tile: int, keys: int = 0
) -> torch.Tensor:
    """[tiles, TILE_WORDS] int32 of cut_prompts, or items: as many as rows of more than `shortest`
    tokens have, or can need where only the device knows them."""
    num_seqs, num_tokens = batch.num_seqs, batch.num_tokens
    if batch.is_exact:
        fed = np.diff(batch.cu_seqlens_q)
        num_tiles = int(np.sum(-(-fed[fed > shortest] // tokens_per_tile)))
    else:
        num_tiles = num_tokens // tokens_per_tile + min(num_seqs, num_tokens // (shortest + 1))
    lengths = batch.seq_lens_dev
    tiles = torch.empty((num_tiles, TILE_WORDS), dtype=torch.int32, device=lengths.device)
    cut_prompts[(cdiv(num_tiles, _TILES_PER_PROGRAM),)](
        lengths, batch.cu_seqlens_q_dev, tiles, num_seqs, num_tiles, SHORTEST=shortest,
        TOKENS=tokens_per_tile, KEYS=keys, ROWS=max(16, pad2(num_seqs)), TILES=_TILES_PER_PROGRAM,
        SIZE=TILE_WORDS, PDL=has_pdl(), num_warps=4,
    )  # fmt: skip
    return tiles
