"""Paged attention of rows that feed many tokens: prompts, and chunks of prompts after a prefix.

One program serves some tokens of a row and all query heads of one kv head: they are the rows of one
matrix. All keys and values come from the cache, where rope.py has put those of the step. Where the
GPU has a tensor copy engine it fetches them.
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
    q, out, k_cache, v_cache, k_tiles, v_tiles, tiles, block_tables, slot_mapping, sinks, scale,
    cap, stride_q, stride_q_head, stride_table,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, V_WIDTH_PAD: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, PADDED: tl.constexpr,
    ENGINE: tl.constexpr, EXACT: tl.constexpr, TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, tiles of plan.cut_prompts). PADDED: the step may have tokens without a slot.
    ENGINE: tiles that all tokens see whole come through the tensor descriptors *_tiles.

    Keys are read in tiles that begin at multiples of N of the sequence. With PADDED one loop takes
    them all, and a token's bits depend on its sequence alone, however it is fed: tiles that only
    its neighbours in the program see have weights of 0. FD_BATCH_INVARIANT relies on that.
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
    if WINDOW == 0 and not PADDED:
        whole = (context + begin + 1) // N * N
        if CHUNK > 0:  # the last token's may begin within them
            whole = tl.where(first_key_of(end - 1, WINDOW, CHUNK) <= start, whole, start)
        blocks = look_up(table, start, n, whole, BLOCK_SIZE, N)
        for first in tl.range(start, whole, N, num_stages=STAGES):
            if ENGINE:  # a tile lies within one block
                slot = blocks * BLOCK_SIZE + first % BLOCK_SIZE
                keys = k_tiles.load([slot, head * WIDTH])
                values = v_tiles.load([slot, head * V_WIDTH])
            else:
                slots = slots_of(blocks, first, n, BLOCK_SIZE, N) * NUM_KV_HEADS + head
                keys = tl.load(
                    k_cache + slots[:, None] * WIDTH + dims[None, :], mask=wide, other=0.0
                )
                values = tl.load(
                    v_cache + slots[:, None] * V_WIDTH + v_dims[None, :], mask=v_wide, other=0.0
                )
            blocks = look_up(table, first + N, n, whole, BLOCK_SIZE, N)
            scores = capped(product(queries, tl.trans(keys), None, EXACT) * scale, cap, SOFTCAP)
            weights, fade, scores_max, total = soften(scores, scores_max, total)
            acc = product(weights.to(values.dtype), values, acc * fade, EXACT)
        start = whole
    blocks = look_up(table, start, n, end, BLOCK_SIZE, N)
    for first in tl.range(start, end, N, num_stages=STAGES):
        key = first + n
        kept = (key < end) & (key >= first_key)
        if PADDED:
            # Slots that nobody has written may hold anything, NaN included: those of padding.
            new = key - context
            is_new = (new >= 0) & (new < fed)
            kept = kept & (tl.load(slot_mapping + first_token + new, mask=is_new, other=0) >= 0)
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
