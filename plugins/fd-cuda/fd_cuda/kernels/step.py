"""Around a decode step: from the slots' state to its inputs, and from sampled tokens back. One
kernel each."""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl

from .common import cdiv, join_chain, options, pad2

Post: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
# Codes the host reads in place of tokens; see contracts/ops/.
NOT_ACCEPTED = tl.constexpr(-1)
NOT_FINITE = tl.constexpr(-2)
NOTHING_POSSIBLE = tl.constexpr(-3)


@triton.jit
def _post(
    values,
    mask,
    box_p,
    turn_p,
    row,
    nth,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Past all caches to the host's memory, which nothing else here makes visible before the step
    ends."""
    turn = tl.load(turn_p)
    place = ((turn % PAGES) * ROWS + row) * WIDTH + nth
    tl.store(box_p + place, (turn << 32) | (values & 0xFFFFFFFF), mask=mask, cache_modifier=".wt")


@triton.jit(do_not_specialize=["num_slots"])
def _prepare(
    slots_p, tables_p, computed_p, newest_p, drafts_p, num_drafts_p, room_p, num_slots, max_blocks,
    k,
    turn_p, ids_p, positions_p, mapping_p, lens_p, out_p,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, TABLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        tl.store(turn_p, tl.load(turn_p) + 1)
    slot = tl.load(slots_p + row)
    start = tl.load(computed_p + slot)
    is_row = (slot < num_slots - 1) & (start < tl.load(room_p + slot))
    start = tl.where(is_row, start, 0)
    nth = tl.arange(0, PAD)
    feeds = (nth <= tl.load(num_drafts_p + slot)) & is_row & (nth < WIDTH)
    where = start + tl.where(feeds, nth, 0)
    ids = tl.load(drafts_p + slot * k + nth - 1, mask=feeds & (nth > 0), other=0)
    ids = tl.where(nth == 0, tl.load(newest_p + slot), ids)
    table = tables_p + slot * max_blocks
    block = tl.load(table + where // BLOCK_SIZE, mask=feeds, other=0).to(tl.int64)
    place = block * BLOCK_SIZE + where % BLOCK_SIZE
    out = row * WIDTH + nth
    tl.store(ids_p + out, tl.where(feeds, ids, 0), mask=nth < WIDTH)
    tl.store(positions_p + out, where, mask=nth < WIDTH)
    tl.store(mapping_p + out, tl.where(feeds, place, -1), mask=nth < WIDTH)
    tl.store(lens_p + row, tl.where(is_row, start + WIDTH, 0).to(tl.int32))
    for first in range(0, max_blocks, TABLE):
        column = first + tl.arange(0, TABLE)
        blocks = tl.load(table + column, mask=column < max_blocks, other=0)
        tl.store(out_p + row * max_blocks + column, blocks, mask=column < max_blocks)


@triton.jit(do_not_specialize=["num_rows"])
def _place(
    positions_p, room_p, tables_p, where_p, mapping_p, lens_p, num_rows, max_blocks,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    where = tl.load(positions_p + row, mask=is_row, other=0)
    fits = (where < tl.load(room_p + row, mask=is_row, other=0)) & is_row
    where = tl.where(fits, where, 0)
    block = tl.load(tables_p + row * max_blocks + where // BLOCK_SIZE, mask=fits, other=0)
    place = block.to(tl.int64) * BLOCK_SIZE + where % BLOCK_SIZE
    tl.store(where_p + row, where, mask=is_row)
    tl.store(mapping_p + row, tl.where(fits, place, -1), mask=is_row)
    tl.store(lens_p + row, tl.where(fits, where + 1, 0).to(tl.int32), mask=is_row)


@triton.jit(do_not_specialize=["num_slots"])
def _finish(
    slots_p, drawn_p, marked_p, peaks_p, drafts_p, num_drafts_p, computed_p, newest_p, results_p,
    last_p, box_p, turn_p, num_slots, k,
    WIDTH: tl.constexpr, PAD: tl.constexpr, HAS_PEAKS: tl.constexpr, HAS_POST: tl.constexpr,
    PAGES: tl.constexpr, POST_ROWS: tl.constexpr, POST_WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_p + row)
    nth = tl.arange(0, PAD)
    place = row * WIDTH + nth
    inside = nth < WIDTH
    drawn = tl.load(drawn_p + place, mask=inside, other=-1)
    start = tl.load(computed_p + slot)
    judged = tl.minimum(tl.load(num_drafts_p + slot), WIDTH - 1)
    fed = nth < judged
    drafts = tl.load(drafts_p + slot * k + nth, mask=fed, other=-2)
    behind = tl.load(marked_p + place + 1, mask=fed, other=-1)
    marked = tl.load(marked_p + place, mask=inside, other=0)
    if HAS_PEAKS:
        behind = tl.where(
            _is_finite(tl.load(peaks_p + place + 1, mask=fed, other=0.0)), behind, NOT_FINITE
        )
        marked = tl.where(
            _is_finite(tl.load(peaks_p + place, mask=inside, other=0.0)), marked, NOT_FINITE
        )
    is_right = fed & (drawn == drafts) & (behind >= 0)
    accepted = tl.min(tl.where(is_right, PAD, nth), 0).to(tl.int64)
    token = tl.sum(tl.where(nth == accepted, drawn, 0), 0)
    is_row = slot < num_slots - 1
    # Several rows may name the last slot; it stays as it is.
    tl.store(newest_p + slot, token, mask=is_row)
    tl.store(computed_p + slot, start + 1 + accepted, mask=is_row)
    results = tl.where(nth <= accepted, marked, NOT_ACCEPTED)
    tl.store(results_p + place, results, mask=inside)
    if HAS_POST:
        _post(results, inside, box_p, turn_p, row, nth, PAGES, POST_ROWS, POST_WIDTH)
        _post(judged, row >= 0, box_p, turn_p, row, WIDTH, PAGES, POST_ROWS, POST_WIDTH)
        _post(accepted, row >= 0, box_p, turn_p, row, WIDTH + 1, PAGES, POST_ROWS, POST_WIDTH)
    tl.store(last_p + row, row * WIDTH + accepted)


@triton.jit(do_not_specialize=["num_slots", "vocab_size", "n"])
def _keep(
    slots_p, proposals_p, results_p, limit_p, vocab_size, computed_p, room_p, drafts_p,
    num_drafts_p,
    out_p, box_p, turn_p, num_slots, n, k, WIDTH: tl.constexpr, PAD: tl.constexpr,
    HAS_POST: tl.constexpr,
    PAGES: tl.constexpr, POST_ROWS: tl.constexpr, POST_WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_p + row)
    left = tl.load(room_p + slot) - 1 - tl.load(computed_p + slot)
    left = tl.minimum(left, tl.load(limit_p))
    left = tl.where(slot < num_slots - 1, left, 0)
    nth = tl.arange(0, PAD)
    ids = tl.load(proposals_p + row * n + nth, mask=nth < n, other=-1)
    is_token = (ids >= 0) & (ids < vocab_size) & (nth < left)
    first_wrong = tl.min(tl.where(is_token, PAD, nth), 0)
    kept = nth < first_wrong
    strange = (ids < -1) | (ids >= vocab_size)
    taken = tl.where(kept, ids, tl.where(strange, -2, -1))
    if HAS_POST:
        _post(taken, nth < n, box_p, turn_p, row, nth, PAGES, POST_ROWS, POST_WIDTH)
    if WIDTH > 0:
        results = tl.load(results_p + row * WIDTH + nth, mask=nth < WIDTH, other=0)
        tl.store(out_p + row * (WIDTH + n) + nth, results, mask=nth < WIDTH)
    tl.store(out_p + row * (WIDTH + n) + WIDTH + nth, taken, mask=nth < n)
    tl.store(drafts_p + slot * k + nth, tl.where(kept, ids, 0), mask=nth < k)
    tl.store(num_drafts_p + slot, first_wrong.to(tl.int64))


@triton.jit(do_not_specialize=["count"])
def _mark(
    drawn_p, peaks_p, possible_p, out_p, count,
    HAS_POSSIBLE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    drawn = tl.load(drawn_p + place, mask=mask, other=0)
    if HAS_POSSIBLE:
        possible = tl.load(possible_p + place, mask=mask, other=0.0)
        drawn = tl.where(_is_finite(possible), drawn, NOTHING_POSSIBLE)
    peak = tl.load(peaks_p + place, mask=mask, other=0.0)
    tl.store(out_p + place, tl.where(_is_finite(peak), drawn, NOT_FINITE), mask=mask)


@triton.jit
def _is_finite(x):
    return (x == x) & (tl.abs(x) < float("inf"))


def prepare_decode(
    slots: torch.Tensor,
    tables: torch.Tensor,
    num_computed: torch.Tensor,
    newest: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    room: torch.Tensor,
    block_size: int,
    turn: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    """Begin a turn: fill the last five from the slots of the rows."""
    num_rows = slots.shape[0]
    if not num_rows:
        return
    width, max_blocks = input_ids.shape[0] // num_rows, tables.shape[1]
    _prepare[(num_rows,)](
        slots, tables, num_computed, newest, drafts, num_drafts, room, num_computed.shape[0],
        max_blocks, drafts.shape[1], turn, input_ids, positions, slot_mapping, seq_lens,
        block_tables,
        BLOCK_SIZE=block_size, WIDTH=width, PAD=pad2(width), TABLE=min(1024, pad2(max_blocks)),
        **options(num_warps=4),
    )  # fmt: skip


def place_tokens(
    positions: torch.Tensor, room: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(positions, slots of the cache, lengths) of a step with one token of each row."""
    num_rows, block = positions.shape[0], 128
    where, mapping = torch.empty_like(positions), torch.empty_like(positions)
    lens = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
    if num_rows:
        _place[(cdiv(num_rows, block),)](
            positions, room, block_tables, where, mapping, lens, num_rows, block_tables.shape[1],
            BLOCK_SIZE=block_size, BLOCK=block, **options(num_warps=4),
        )  # fmt: skip
    return where, mapping, lens


def finish_decode(
    slots: torch.Tensor,
    drawn: torch.Tensor,
    marked: torch.Tensor,
    peaks: torch.Tensor | None,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    num_computed: torch.Tensor,
    newest: torch.Tensor,
    results: torch.Tensor,
    post: Post | None,
) -> torch.Tensor:
    """Drafts are judged, slots take what was sampled, results what the host is to know."""
    num_rows, width = results.shape
    last = torch.empty(num_rows, dtype=torch.int64, device=drawn.device)
    if num_rows:
        _finish[(num_rows,)](
            slots, drawn, marked, drawn if peaks is None else peaks, drafts, num_drafts,
            num_computed, newest, results, last, *_where(post, results), num_computed.shape[0],
            drafts.shape[1], WIDTH=width, PAD=pad2(width), HAS_PEAKS=peaks is not None,
            **_pages(post), **options(num_warps=1),
        )  # fmt: skip
    return last


def keep_drafts(
    slots: torch.Tensor,
    proposals: torch.Tensor,
    results: torch.Tensor,
    limit: torch.Tensor,
    vocab_size: int,
    num_computed: torch.Tensor,
    room: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    post: Post | None,
) -> torch.Tensor:
    """Slots take what a drafter proposes; the results, and what was taken."""
    proposals = proposals.contiguous()
    (num_rows, n), k, width = proposals.shape, drafts.shape[1], results.shape[1]
    both = torch.empty((num_rows, width + n), dtype=torch.int64, device=proposals.device)
    if num_rows:
        _keep[(num_rows,)](
            slots, proposals, results, limit, vocab_size, num_computed, room, drafts, num_drafts,
            both, *_where(post, both), num_computed.shape[0], n, k,
            WIDTH=width, PAD=pad2(max(k + 1, width)), **_pages(post), **options(num_warps=1),
        )  # fmt: skip
    return both


def _where(post: Post | None, instead: torch.Tensor) -> Post:
    """What a kernel is handed to post to."""
    return (instead, instead) if post is None else post


def _pages(post: Post | None) -> dict[str, int]:
    """The shape of a box."""
    shape = (1, 1, 1) if post is None else post[0].shape
    names = ("PAGES", "POST_ROWS", "POST_WIDTH")
    return {"HAS_POST": post is not None, **dict(zip(names, shape, strict=True))}


def mark_broken(
    drawn: torch.Tensor, peaks: torch.Tensor, possible: torch.Tensor | None
) -> torch.Tensor:
    """drawn, with a code in place of what means nothing."""
    out = torch.empty_like(drawn)
    if drawn.shape[0]:
        block = 256
        _mark[(cdiv(drawn.shape[0], block),)](
            drawn, peaks, drawn if possible is None else possible, out, drawn.shape[0],
            HAS_POSSIBLE=possible is not None, BLOCK=block, **options(num_warps=2),
        )  # fmt: skip
    return out
