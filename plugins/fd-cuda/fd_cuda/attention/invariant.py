"""Paged attention under FD_BATCH_INVARIANT: a token's bits depend on its sequence alone, whether it
was fed in a prompt, a part of one, or by itself.

All keys come from the cache, the step's own among them, in tiles that begin at multiples of N of
the sequence. So a token meets the same tiles in the same order however it is fed. Tiles that only
its neighbours in the program see change nothing: their weights are 0. No row is split by keys,
which makes decodes of long contexts slow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import capped, first_key_of, look_up, product, slots_of, start_of_softmax


@triton.jit
def invariant_attention(
    q, out, k_cache, v_cache, tiles, block_tables, slot_mapping, sinks, scale, cap,
    stride_q, stride_q_head, stride_table,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, V_WIDTH_PAD: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """Grid (kv heads, tiles of plan.cut_prompts). A program serves TOKENS tokens of a row and all
    query heads of one kv head: the M rows of one matrix."""
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
        new_max = tl.maximum(scores_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        fade = tl.exp2(scores_max - new_max)
        total = total * fade + tl.sum(weights, 1)
        acc = product(weights.to(values.dtype), values, acc * fade[:, None], EXACT)
        scores_max = new_max

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # rows that stand in see nothing
    out_rows = (at * (NUM_KV_HEADS * GROUP) + q_head) * V_WIDTH
    tl.store(
        out + out_rows[:, None] + v_dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=of_row[:, None] & v_wide,
    )
