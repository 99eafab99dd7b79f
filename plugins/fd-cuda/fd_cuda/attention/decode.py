"""Paged attention of rows that feed a few tokens: rotation, cache write, split keys, one kernel.

One program serves one kv head of one split of a row: the query heads of a group and the row's
tokens are the rows of one matrix. The last program of a row to finish adds up its splits, in their
order, so that results do not depend on who that is. Split 0 also sees to the step's own tokens: it
takes them from the arguments, rotates their keys, and writes them to the cache for later steps.

What a program reads before `gdc_wait` was written by the plan's kernel or earlier; that kernel lets
none after it start early. So the first tile of keys comes from memory while the projection before
this kernel still runs. These reads go past the L1 cache, which may hold what was there before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fd_cuda.kernels.common import leave_chain

from .common import (
    LOWEST,
    capped,
    first_key_of,
    load_rotated,
    look_up,
    product,
    slots_of,
    soften,
    start_of_softmax,
)


@triton.jit
def _attend_tile(
    q, k, v, visible, scores_max, total, acc, scale, cap, EXACT: tl.constexpr, SOFTCAP: tl.constexpr
):
    """One step of the running softmax (base 2) over a tile of keys; invisible keys are -inf."""
    scores = capped(product(q, tl.trans(k), None, EXACT) * scale, cap, SOFTCAP)
    scores = tl.where(visible, scores, float("-inf"))
    weights, fade, scores_max, total = soften(scores, scores_max, total)
    acc = product(weights.to(v.dtype), v, acc * fade, EXACT)
    return scores_max, total, acc


@triton.jit
def _visible(seen, keys, tokens, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """[tokens, keys]: those of the `seen` keys that are not too far away; both by their index."""
    visible = seen[None, :]
    if WINDOW > 0:
        visible = visible & (keys[None, :] > tokens[:, None] - WINDOW)
    if CHUNK > 0:
        visible = visible & (keys[None, :] // CHUNK == tokens[:, None] // CHUNK)
    return visible


@triton.jit(do_not_specialize=["stride_table"])
def decode_attention(
    q,
    k,
    v,
    out,
    k_cache,
    v_cache,
    items,
    block_tables,
    slot_mapping,
    positions,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    sinks,
    part_acc,
    part_max,
    part_total,
    counters,
    scale,
    cap,
    stride_q,
    stride_k,
    stride_v,
    stride_q_head,
    stride_k_head,
    stride_v_head,
    stride_table,
    num_kv_heads,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    V_WIDTH_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WRITES: tl.constexpr,
    EXACT: tl.constexpr,
    ITEM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (work items, kv heads). TOKENS: the most a row feeds, padded. M: rows of the matrix, of
    which ROWS (a power of two) are used."""
    if PDL:
        gdc_launch_dependents()
    item = items + tl.program_id(0) * ITEM
    row = tl.load(item, cache_modifier=".cg")
    if row < 0:
        leave_chain(PDL)
        return
    head = tl.program_id(1)
    tile_begin = tl.load(item + 1, cache_modifier=".cg")
    tile_end = tl.load(item + 2, cache_modifier=".cg")
    split = tl.load(item + 3, cache_modifier=".cg")
    num_splits = tl.load(item + 4, cache_modifier=".cg")
    context = tl.load(item + 5, cache_modifier=".cg")
    first_token = tl.load(item + 6, cache_modifier=".cg")
    fed = tl.load(item + 7, cache_modifier=".cg")
    dims, v_dims = tl.arange(0, WIDTH_PAD), tl.arange(0, V_WIDTH_PAD)
    wide, v_wide = (dims < WIDTH)[None, :], (v_dims < V_WIDTH)[None, :]

    # The first tile of the cache, before anything that this layer computes.
    table = block_tables + row.to(tl.int64) * stride_table
    n = tl.arange(0, TILE)
    first = tile_begin * TILE
    first_key = first_key_of(context, WINDOW, CHUNK)  # what lies before is not the row's any more
    seen = (first + n < context) & (first + n >= first_key)
    blocks = look_up(table, first, n, context, BLOCK_SIZE, TILE)
    slots = slots_of(blocks, first, n, BLOCK_SIZE, TILE) * num_kv_heads + head
    blocks = look_up(table, first + TILE, n, context, BLOCK_SIZE, TILE)
    first_keys = tl.load(
        k_cache + slots[:, None] * WIDTH + dims[None, :],
        mask=seen[:, None] & wide,
        other=0.0,
        cache_modifier=".cg",
    )
    first_values = tl.load(
        v_cache + slots[:, None] * V_WIDTH + v_dims[None, :],
        mask=seen[:, None] & v_wide,
        other=0.0,
        cache_modifier=".cg",
    )
    m = tl.arange(0, M)
    token = m // GROUP
    of_row = token < fed
    q_head = head * GROUP + m % GROUP
    q_rows = (first_token + token).to(tl.int64) * stride_q + q_head * stride_q_head
    position = tl.load(positions + first_token + token, mask=of_row, other=0)
    if PDL:
        gdc_wait()

    queries = load_rotated(
        q, q_rows, of_row, position, cos_sin, q_norm, eps,
        WIDTH, WIDTH_PAD, ROTARY, INTERLEAVED, NORMS,
    )  # fmt: skip
    index = context + token
    scores_max, total = start_of_softmax(sinks, q_head, split == 0, M, SINKS)
    acc = tl.zeros([M, V_WIDTH_PAD], tl.float32)
    if split == 0:
        new = tl.arange(0, TOKENS)
        is_new = new < fed
        at = (first_token + new).to(tl.int64)
        k_position = tl.load(positions + at, mask=is_new, other=0)
        k_rows = at * stride_k + head * stride_k_head
        new_keys = load_rotated(
            k, k_rows, is_new, k_position, cos_sin, k_norm, eps,
            WIDTH, WIDTH_PAD, ROTARY, INTERLEAVED, NORMS,
        )  # fmt: skip
        v_rows = at * stride_v + head * stride_v_head
        new_values = tl.load(
            v + v_rows[:, None] + v_dims[None, :], mask=is_new[:, None] & v_wide, other=0.0
        )
        if WRITES:
            slot = tl.load(slot_mapping + at, mask=is_new, other=-1)
            kept = (slot >= 0)[:, None]
            place = (slot * num_kv_heads + head)[:, None]
            tl.store(k_cache + place * WIDTH + dims[None, :], new_keys, mask=kept & wide)
            tl.store(v_cache + place * V_WIDTH + v_dims[None, :], new_values, mask=kept & v_wide)
        visible = _visible(is_new, context + new, index, WINDOW, CHUNK)
        visible = visible & (new[None, :] <= token[:, None])
        scores_max, total, acc = _attend_tile(
            queries, new_keys, new_values, visible, scores_max, total, acc, scale, cap, EXACT,
            SOFTCAP,
        )  # fmt: skip

    visible = _visible(seen, first + n, index, WINDOW, CHUNK)
    scores_max, total, acc = _attend_tile(
        queries, first_keys, first_values, visible, scores_max, total, acc, scale, cap, EXACT,
        SOFTCAP,
    )  # fmt: skip
    for tile in tl.range(tile_begin + 1, tile_end, num_stages=STAGES):
        first = tile * TILE
        seen = (first + n < context) & (first + n >= first_key)
        slots = slots_of(blocks, first, n, BLOCK_SIZE, TILE) * num_kv_heads + head
        blocks = look_up(table, first + TILE, n, context, BLOCK_SIZE, TILE)
        keys = tl.load(
            k_cache + slots[:, None] * WIDTH + dims[None, :], mask=seen[:, None] & wide, other=0.0
        )
        values = tl.load(
            v_cache + slots[:, None] * V_WIDTH + v_dims[None, :],
            mask=seen[:, None] & v_wide,
            other=0.0,
        )
        visible = _visible(seen, first + n, index, WINDOW, CHUNK)
        scores_max, total, acc = _attend_tile(
            queries, keys, values, visible, scores_max, total, acc, scale, cap, EXACT, SOFTCAP
        )

    store_rows(
        out, acc, scores_max, total, part_acc, part_max, part_total, counters, row, split,
        num_splits,
        first_token, fed, num_kv_heads * GROUP, GROUP, M, ROWS, V_WIDTH, V_WIDTH_PAD,
    )  # fmt: skip


@triton.jit
def store_rows(
    out,
    acc,
    scores_max,
    total,
    part_acc,
    part_max,
    part_total,
    counters,
    row,
    split,
    num_splits,
    first_token,
    fed,
    num_heads,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
):
    """The end of every program that attends for HEADS heads of `fed` tokens: its results, or its
    part of a row, and the whole row's if it is the last to come. Rows of the matrix are tokens
    times HEADS."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    dims = tl.arange(0, PAD)
    if num_splits == 1:
        m = tl.arange(0, M)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        _store_tokens(
            out, result, m, dims, first_token, fed, group * HEADS, num_heads, HEADS, WIDTH
        )
    else:
        part = tl.program_id(0).to(tl.int64) * groups + group
        is_last = leave_part(
            acc, scores_max, total, part_acc, part_max, part_total, part,
            counters + row * groups + group, num_splits, M, ROWS, PAD,
        )  # fmt: skip
        if is_last:
            r = tl.arange(0, ROWS)
            result = add_parts(
                part_acc, part_max, part_total, part - split * groups, groups, num_splits, ROWS, PAD
            )
            _store_tokens(
                out, result, r, dims, first_token, fed, group * HEADS, num_heads, HEADS, WIDTH
            )


@triton.jit
def _store_tokens(
    out, result, m, dims, first_token, fed, first_head, num_heads,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head = m // HEADS, first_head + m % HEADS
    mine = (token < fed) & (head < num_heads)
    at = (first_token + token).to(tl.int64) * num_heads + head
    tl.store(
        out + at[:, None] * WIDTH + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=mine[:, None] & (dims < WIDTH)[None, :],
    )


@triton.jit
def leave_part(
    acc,
    scores_max,
    total,
    part_acc,
    part_max,
    part_total,
    part,
    counter,
    num_splits,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    V_WIDTH_PAD: tl.constexpr,
):
    """Leave a split's sums in memory for whoever comes last; is that this program?"""
    m, dims = tl.arange(0, M), tl.arange(0, V_WIDTH_PAD)
    used = m < ROWS
    rows = part * ROWS + m
    tl.store(part_acc + rows[:, None] * V_WIDTH_PAD + dims[None, :], acc, mask=used[:, None])
    tl.store(part_max + rows, scores_max, mask=used)
    tl.store(part_total + rows, total, mask=used)
    tl.debug_barrier()  # all of this program's stores, before its arrival is announced
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived == num_splits - 1:
        tl.store(counter, 0)  # for the next layer
    return arrived == num_splits - 1


@triton.jit
def add_parts(
    part_acc,
    part_max,
    part_total,
    first_part,
    stride,
    num_splits,
    ROWS: tl.constexpr,
    V_WIDTH_PAD: tl.constexpr,
):
    """[ROWS, V_WIDTH_PAD] float32: the softmax over all splits of a row, added in their order."""
    # As many splits at once as registers hold: their loads then wait for memory together.
    SIZE: tl.constexpr = ROWS * V_WIDTH_PAD
    AT_ONCE: tl.constexpr = 8 if SIZE <= 1024 else (4 if SIZE <= 2048 else 1)
    r, dims, s = tl.arange(0, ROWS), tl.arange(0, V_WIDTH_PAD), tl.arange(0, AT_ONCE)
    best = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V_WIDTH_PAD], tl.float32)
    for start in range(0, num_splits, AT_ONCE):
        there = start + s < num_splits
        rows = ((first_part + (start + s) * stride) * ROWS)[:, None] + r[None, :]
        maxima = tl.load(part_max + rows, mask=there[:, None], other=LOWEST, cache_modifier=".cg")
        totals = tl.load(part_total + rows, mask=there[:, None], other=0.0, cache_modifier=".cg")
        values = tl.load(
            part_acc + rows[:, :, None] * V_WIDTH_PAD + dims[None, None, :],
            mask=there[:, None, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_best = tl.maximum(best, tl.max(maxima, 0))
        weights = tl.exp2(maxima - new_best[None, :])
        fade = tl.exp2(best - new_best)
        total = total * fade + tl.sum(weights * totals, 0)
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * values, 0)
        best = new_best
    total = tl.where(total == 0.0, 1.0, total)
    return acc / total[:, None]
