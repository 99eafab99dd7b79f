"""Paged attention of rows that feed many tokens: prompts, and chunks of prompts after a prefix.

One program serves some tokens of a row and all query heads of one kv head: they are the rows of one
matrix. Keys and values of the step itself are read where they lie (contiguous, rotated by rope.py),
those before them from the cache. Where the GPU has a tensor copy engine it fetches the tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from fd_cuda.kernels.common import cdiv

from .common import capped, first_key_of, look_up, product, slots_of, soften, start_of_softmax

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch
    from torch import Tensor

_CLEARED_ROWS = 16


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def clear_padding(
    out, cu_seqlens, num_seqs, num_tokens, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Zeros for the tokens after the last row's. Grid (cdiv(num_tokens, ROWS))."""
    begin = tl.program_id(0) * ROWS
    first = tl.load(cu_seqlens + num_seqs)
    if begin + ROWS > first:
        rows = begin + tl.arange(0, ROWS)
        mask = (rows >= first) & (rows < num_tokens)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            place = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
            zeros = tl.zeros([ROWS, BLOCK], out.dtype.element_ty)
            tl.store(place, zeros, mask=mask[:, None] & (columns < width)[None, :])


def zero_padding(out: Tensor, batch: AttentionBatch) -> None:
    """Zeros in `out`, [num_tokens, width], after the last row's tokens, as the device knows it."""
    tokens, width = out.shape
    clear_padding[(cdiv(tokens, _CLEARED_ROWS),)](
        out, batch.cu_seqlens_q_dev, batch.num_seqs, tokens, width, ROWS=_CLEARED_ROWS,
        BLOCK=256, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_table"])
def prefill_attention(
    q,
    k,
    v,
    out,
    k_cache,
    v_cache,
    k_tiles,
    v_tiles,
    k_cache_tiles,
    v_cache_tiles,
    tiles,
    block_tables,
    sinks,
    scale,
    cap,
    stride_q,
    stride_v,
    stride_q_head,
    stride_v_head,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    V_WIDTH_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    N_CACHE: tl.constexpr,
    STAGES: tl.constexpr,
    ENGINE: tl.constexpr,
    ENGINE_CACHE: tl.constexpr,
    EXACT: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """Grid (kv heads, tiles). ENGINE: tensor descriptors *_tiles instead of addresses.

    The tile's own diagonal comes first: its keys and values are on their way while the queries are.
    """
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * TILE_WORDS
    row, begin = tl.load(tile), tl.load(tile + 1)
    first_token, fed = tl.load(tile + 2), tl.load(tile + 3)
    context = tl.load(tile + 4)
    dims, v_dims = tl.arange(0, WIDTH_PAD), tl.arange(0, V_WIDTH_PAD)
    wide, v_wide = (dims < WIDTH)[None, :], (v_dims < V_WIDTH)[None, :]

    own = tl.arange(0, N)
    diagonal = begin // N * N
    end = tl.minimum(begin + TOKENS, fed)
    k_base = k + (first_token.to(tl.int64) * NUM_KV_HEADS + head) * WIDTH
    v_base = v + first_token.to(tl.int64) * stride_v + head * stride_v_head
    m = tl.arange(0, M)
    token = begin + m // GROUP
    of_row = (token < fed) & (m < TOKENS * GROUP)
    q_head = head * GROUP + m % GROUP
    at = (first_token + token).to(tl.int64)
    q_rows = q + at * stride_q + q_head * stride_q_head
    queries = tl.load(q_rows[:, None] + dims[None, :], mask=of_row[:, None] & wide, other=0.0)
    scores_max, total = start_of_softmax(sinks, q_head, True, M, SINKS)
    acc = tl.zeros([M, V_WIDTH_PAD], tl.float32)
    # With a window or chunks, a token sees keys from `first_seen` on, the tile's first from
    # `first_key` on; by their index in the sequence.
    BOUNDED: tl.constexpr = WINDOW > 0 or CHUNK > 0
    first_seen = first_key_of(context + token, WINDOW, CHUNK)
    first_key = first_key_of(context + begin, WINDOW, CHUNK)
    # The step's own tokens before: every token of the tile sees them, if they are not too far away.
    own_begin = tl.maximum(first_key - context, 0) // N * N
    for first in tl.range(own_begin, diagonal, N, num_stages=STAGES):
        if ENGINE:
            keys = k_tiles.load([first_token + first, head * WIDTH])
            values = v_tiles.load([first_token + first, head * V_WIDTH])
        else:
            rows = (first + own).to(tl.int64)[:, None]
            keys = tl.load(
                k_base + rows * (NUM_KV_HEADS * WIDTH) + dims[None, :], mask=wide, other=0.0
            )
            values = tl.load(v_base + rows * stride_v + v_dims[None, :], mask=v_wide, other=0.0)
        scores = capped(product(queries, tl.trans(keys), None, EXACT) * scale, cap, SOFTCAP)
        if BOUNDED:
            index = context + first + own
            scores = tl.where(index[None, :] >= first_seen[:, None], scores, float("-inf"))
        weights, fade, scores_max, total = soften(scores, scores_max, total)
        acc = product(weights.to(values.dtype), values, acc * fade, EXACT)

    # And those that some tokens of the tile see. After the row stand others' values.
    for first in tl.range(diagonal, end, N, num_stages=1):
        rows = (first + own).to(tl.int64)[:, None]
        inside = rows < fed
        keys = tl.load(
            k_base + rows * (NUM_KV_HEADS * WIDTH) + dims[None, :], mask=inside & wide, other=0.0
        )
        values = tl.load(
            v_base + rows * stride_v + v_dims[None, :], mask=inside & v_wide, other=0.0
        )
        scores = capped(product(queries, tl.trans(keys), None, EXACT) * scale, cap, SOFTCAP)
        visible = (first + own)[None, :] <= token[:, None]
        if BOUNDED:
            visible = visible & ((context + first + own)[None, :] >= first_seen[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        weights, fade, scores_max, total = soften(scores, scores_max, total)
        acc = product(weights.to(values.dtype), values, acc * fade, EXACT)

    # What stands in the cache: every token of the row sees all of it, if it is not too far away.
    # What lies before `first_key` is not the row's any more, and may hold anything.
    table = block_tables + row.to(tl.int64) * stride_table
    n = tl.arange(0, N_CACHE)
    whole = context // N_CACHE * N_CACHE
    cache_begin = first_key // N_CACHE * N_CACHE
    blocks = look_up(table, cache_begin, n, context, BLOCK_SIZE, N_CACHE)
    for first in tl.range(cache_begin, whole, N_CACHE, num_stages=STAGES):
        if ENGINE_CACHE:  # a tile lies within one block
            slot = blocks * BLOCK_SIZE + first % BLOCK_SIZE
            keys = k_cache_tiles.load([slot, head * WIDTH])
            values = v_cache_tiles.load([slot, head * V_WIDTH])
        else:
            slots = slots_of(blocks, first, n, BLOCK_SIZE, N_CACHE) * NUM_KV_HEADS + head
            of_keys, of_values = wide, v_wide
            if BOUNDED:
                kept = (first + n >= first_key)[:, None]
                of_keys, of_values = kept & wide, kept & v_wide
            keys = tl.load(
                k_cache + slots[:, None] * WIDTH + dims[None, :], mask=of_keys, other=0.0
            )
            values = tl.load(
                v_cache + slots[:, None] * V_WIDTH + v_dims[None, :], mask=of_values, other=0.0
            )
        blocks = look_up(table, first + N_CACHE, n, context, BLOCK_SIZE, N_CACHE)
        scores = capped(product(queries, tl.trans(keys), None, EXACT) * scale, cap, SOFTCAP)
        if BOUNDED:
            scores = tl.where((first + n)[None, :] >= first_seen[:, None], scores, float("-inf"))
        weights, fade, scores_max, total = soften(scores, scores_max, total)
        acc = product(weights.to(values.dtype), values, acc * fade, EXACT)
    if (whole < context) & (first_key < context):
        # Slots after the context may hold anything, NaN included.
        seen = (whole + n < context) & (whole + n >= first_key)
        slots = slots_of(blocks, whole, n, BLOCK_SIZE, N_CACHE) * NUM_KV_HEADS + head
        last_keys = tl.load(
            k_cache + slots[:, None] * WIDTH + dims[None, :], mask=seen[:, None] & wide, other=0.0
        )
        last_values = tl.load(
            v_cache + slots[:, None] * V_WIDTH + v_dims[None, :],
            mask=seen[:, None] & v_wide,
            other=0.0,
        )
        last_scores = product(queries, tl.trans(last_keys), None, EXACT) * scale
        last_scores = capped(last_scores, cap, SOFTCAP)
        last_visible = seen[None, :]
        if BOUNDED:
            last_visible = last_visible & ((whole + n)[None, :] >= first_seen[:, None])
        last_scores = tl.where(last_visible, last_scores, float("-inf"))
        last_weights, fade, scores_max, total = soften(last_scores, scores_max, total)
        acc = product(last_weights.to(last_values.dtype), last_values, acc * fade, EXACT)

    acc = acc / total[:, None]
    out_rows = (at * (NUM_KV_HEADS * GROUP) + q_head) * V_WIDTH
    tl.store(
        out + out_rows[:, None] + v_dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=of_row[:, None] & v_wide,
    )


@triton.jit(do_not_specialize=["stride_table"])
def invariant_attention(
    q, out, k_cache, v_cache, tiles, block_tables, slot_mapping, sinks, scale, cap,
    stride_q, stride_q_head, stride_table,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, V_WIDTH_PAD: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """Under FD_BATCH_INVARIANT, for prompts and decodes alike: a token's bits depend on its
    sequence alone, however it is fed. Grid (kv heads, tiles of plan.cut_prompts).

    All keys come from the cache, the step's own among them, in tiles that begin at multiples of N
    of the sequence. So a token meets the same tiles in the same order whether it came in a prompt,
    a part of one, or by itself. Tiles that only its neighbours in the program see change nothing:
    their weights are 0. No row is split by keys, which makes decodes of long contexts slow.
    """
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * TILE_WORDS
    row, begin = tl.load(tile), tl.load(tile + 1)
    first_token, fed = tl.load(tile + 2), tl.load(tile + 3)
    context = tl.load(tile + 4)
    dims, v_dims = tl.arange(0, WIDTH_PAD), tl.arange(0, V_WIDTH_PAD)
    wide, v_wide = (dims < WIDTH)[None, :], (v_dims < V_WIDTH)[None, :]
    m, n = tl.arange(0, M), tl.arange(0, N)
    token = begin + m // GROUP
    of_row = (token < fed) & (m < TOKENS * GROUP)
    q_head = head * GROUP + m % GROUP
    at = (first_token + token).to(tl.int64)
    q_rows = q + at * stride_q + q_head * stride_q_head
    queries = tl.load(q_rows[:, None] + dims[None, :], mask=of_row[:, None] & wide, other=0.0)
    scores_max, total = start_of_softmax(sinks, q_head, True, M, SINKS)
    acc = tl.zeros([M, V_WIDTH_PAD], tl.float32)

    index, end = context + token, context + tl.minimum(begin + TOKENS, fed)
    first_seen = first_key_of(index, WINDOW, CHUNK)
    first_key = first_key_of(context + begin, WINDOW, CHUNK)  # what is before may be others'
    table = block_tables + row.to(tl.int64) * stride_table
    start = first_key // N * N
    blocks = look_up(table, start, n, end, BLOCK_SIZE, N)
    for first in tl.range(start, end, N, num_stages=STAGES):
        key = first + n
        # Slots that nobody has written may hold anything, NaN included: those of padding.
        new = key - context
        is_new = (new >= 0) & (new < fed)
        slot = tl.load(slot_mapping + first_token + new, mask=is_new, other=0)
        kept = (key < end) & (key >= first_key) & (slot >= 0)
        slots = slots_of(blocks, first, n, BLOCK_SIZE, N) * NUM_KV_HEADS + head
        blocks = look_up(table, first + N, n, end, BLOCK_SIZE, N)
        keys = tl.load(
            k_cache + slots[:, None] * WIDTH + dims[None, :], mask=kept[:, None] & wide, other=0.0
        )
        values = tl.load(
            v_cache + slots[:, None] * V_WIDTH + v_dims[None, :],
            mask=kept[:, None] & v_wide,
            other=0.0,
        )
        scores = capped(product(queries, tl.trans(keys), None, EXACT) * scale, cap, SOFTCAP)
        visible = kept[None, :] & (key[None, :] <= index[:, None])
        visible = visible & (key[None, :] >= first_seen[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        weights, fade, scores_max, total = soften(scores, scores_max, total)
        acc = product(weights.to(values.dtype), values, acc * fade, EXACT)

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # rows that stand in see nothing
    out_rows = (at * (NUM_KV_HEADS * GROUP) + q_head) * V_WIDTH
    tl.store(
        out + out_rows[:, None] + v_dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=of_row[:, None] & v_wide,
    )
