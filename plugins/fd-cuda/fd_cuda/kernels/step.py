"""Around a decode step: from the slots' state to its inputs, and from drawn tokens back. One kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import cdiv, join_chain, options, pad2

# Codes the host reads in place of tokens; see contracts/ops.py.
NOT_ACCEPTED = tl.constexpr(-1)
NOT_FINITE = tl.constexpr(-2)
NOTHING_POSSIBLE = tl.constexpr(-3)


@triton.jit(do_not_specialize=["num_slots"])
def _prepare(
    slots_p, tables_p, computed_p, newest_p, drafts_p, num_drafts_p, room_p, num_slots, max_blocks, k,
    ids_p, positions_p, mapping_p, lens_p, out_p,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, TABLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
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
    slots_p, drawn_p, marked_p, accepted_p, computed_p, newest_p, results_p, num_slots,
    WIDTH: tl.constexpr, PAD: tl.constexpr, HAS_ACCEPTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_p + row)
    accepted = tl.load(accepted_p + row) if HAS_ACCEPTED else tl.zeros((), tl.int64)
    is_row = slot < num_slots - 1
    token = tl.load(drawn_p + row * WIDTH + accepted)
    start = tl.load(computed_p + slot)
    # Several rows may name the last slot; it stays as it is.
    tl.store(newest_p + slot, token, mask=is_row)
    tl.store(computed_p + slot, start + 1 + accepted, mask=is_row)
    nth = tl.arange(0, PAD)
    marked = tl.load(marked_p + row * WIDTH + nth, mask=nth < WIDTH, other=0)
    marked = tl.where(nth <= accepted, marked, NOT_ACCEPTED)
    tl.store(results_p + row * WIDTH + nth, marked, mask=nth < WIDTH)


@triton.jit
def _judge(
    slots_p, drawn_p, marked_p, drafts_p, num_drafts_p, out_p, k,
    WIDTH: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_p + row)
    nth = tl.arange(0, PAD)
    fed = (nth < tl.load(num_drafts_p + slot)) & (nth < WIDTH - 1)
    drawn = tl.load(drawn_p + row * WIDTH + nth, mask=fed, other=-1)
    behind = tl.load(marked_p + row * WIDTH + nth + 1, mask=fed, other=-1)
    drafts = tl.load(drafts_p + slot * k + nth, mask=fed, other=-2)
    is_right = fed & (drawn == drafts) & (behind >= 0)
    tl.store(out_p + row, tl.min(tl.where(is_right, PAD, nth), 0).to(tl.int64))


@triton.jit(do_not_specialize=["num_slots", "vocab_size", "n"])
def _keep(
    slots_p, proposals_p, limit_p, vocab_size, computed_p, room_p, drafts_p, num_drafts_p, out_p,
    num_slots, n, k, PAD: tl.constexpr, PDL: tl.constexpr,
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
    tl.store(out_p + row * n + nth, taken, mask=nth < n)
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
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    """Fill the last five from the slots of the rows."""
    num_rows = slots.shape[0]
    if not num_rows:
        return
    width, max_blocks = input_ids.shape[0] // num_rows, tables.shape[1]
    _prepare[(num_rows,)](
        slots, tables, num_computed, newest, drafts, num_drafts, room, num_computed.shape[0],
        max_blocks, drafts.shape[1], input_ids, positions, slot_mapping, seq_lens, block_tables,
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
    num_accepted: torch.Tensor | None,
    num_computed: torch.Tensor,
    newest: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """Slots take what was drawn, results what the host is to know."""
    num_rows, width = results.shape
    if num_rows:
        accepted = slots if num_accepted is None else num_accepted
        _finish[(num_rows,)](
            slots, drawn, marked, accepted, num_computed, newest, results, num_computed.shape[0],
            WIDTH=width, PAD=pad2(width), HAS_ACCEPTED=num_accepted is not None,
            **options(num_warps=1),
        )  # fmt: skip


def judge_drafts(
    slots: torch.Tensor,
    drawn: torch.Tensor,
    marked: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
) -> torch.Tensor:
    """[B] leading drafts that are right."""
    num_rows, width = drawn.shape
    found = torch.empty((num_rows,), dtype=torch.int64, device=drawn.device)
    if num_rows:
        _judge[(num_rows,)](
            slots, drawn, marked, drafts, num_drafts, found, drafts.shape[1],
            WIDTH=width, PAD=pad2(width), **options(num_warps=1),
        )  # fmt: skip
    return found


def keep_drafts(
    slots: torch.Tensor,
    proposals: torch.Tensor,
    limit: torch.Tensor,
    vocab_size: int,
    num_computed: torch.Tensor,
    room: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
) -> torch.Tensor:
    """Slots take what a drafter proposes; what was taken."""
    proposals = proposals.contiguous()
    taken, (num_rows, n) = torch.empty_like(proposals), proposals.shape
    if num_rows:
        k = drafts.shape[1]
        _keep[(num_rows,)](
            slots, proposals, limit, vocab_size, num_computed, room, drafts, num_drafts, taken,
            num_computed.shape[0], n, k, PAD=pad2(k + 1), **options(num_warps=1),
        )  # fmt: skip
    return taken


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
