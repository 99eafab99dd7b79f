"""Attention over a quantized cache. Kernel `quantized_attention` serves decode splits and prefill
tiles alike; the step's own rows are in the cache when it runs.

Numbers are multiplied as they lie in the cache, in the dtype of activations, which holds them
exactly. Dynamic scales belong to a key: they multiply a column of the scores, and of the weights
before values are summed. Static ones belong to a channel: they multiply queries before, and results
after. What int4 is shifted by is added to a key's scores and a row's results; a shift of all keys
by channel does not change the softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fd_cuda.kernels.common import leave_chain

from .common import LOWEST, look_up, product, slots_of, soften
from .decode import store_rows


@triton.jit
def _load_numbers(
    cache,
    rows,
    inside,
    dtype: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    PER_BYTE: tl.constexpr,
):
    """[keys, PAD] of rows of WIDTH numbers, converted."""
    BYTES: tl.constexpr = (WIDTH + PER_BYTE - 1) // PER_BYTE
    at = tl.arange(0, PAD // PER_BYTE)
    mask = inside[:, None] & (at < BYTES)[None, :]
    stored = tl.load(cache + rows[:, None] * BYTES + at[None, :], mask=mask, other=0.0)
    if PER_BYTE == 2:
        wide = stored.to(tl.int32)
        stored = tl.interleave(wide & 15, wide >> 4)
    return stored.to(tl.float32).to(dtype)


@triton.jit(do_not_specialize=["stride_table"])
def quantized_attention(
    q, out, k_cache, v_cache, k_scales, v_scales, v_lows, items, block_tables,
    part_acc, part_max, part_total, counters, scale, stride_q, stride_q_head, stride_table,
    num_kv_heads,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    V_WIDTH_PAD: tl.constexpr, PER_BYTE: tl.constexpr, IS_STATIC: tl.constexpr,
    HAS_LOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, ITEM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (work items, kv heads). Rows of the matrix: the item's tokens times GROUP heads. ROWS (a
    power of two) of the M are used. Items as in latent/. k_scales, v_scales: rows of float16
    after those of the cache, or with IS_STATIC tables [heads, dim] float32, v_lows like the
    latter."""
    if PDL:
        gdc_launch_dependents()
    item = items + tl.program_id(0) * ITEM
    row = tl.load(item)
    if row < 0:
        leave_chain(PDL)
        return
    tile_begin, tile_end = tl.load(item + 1), tl.load(item + 2)
    split, num_splits = tl.load(item + 3), tl.load(item + 4)
    context = tl.load(item + 5)
    first_token, fed = tl.load(item + 6), tl.load(item + 7)
    head = tl.program_id(1)

    m = tl.arange(0, M)
    token, q_head = m // GROUP, head * GROUP + m % GROUP
    mine = token < fed
    at = (first_token + token).to(tl.int64)
    dims, v_dims = tl.arange(0, WIDTH_PAD), tl.arange(0, V_WIDTH_PAD)
    wide, v_wide = dims < WIDTH, v_dims < V_WIDTH
    if PDL:
        gdc_wait()
    q_rows = q + (at * stride_q + q_head * stride_q_head)[:, None]
    queries = tl.load(q_rows + dims[None, :], mask=mine[:, None] & wide[None, :], other=0.0)
    if IS_STATIC:
        k_scale = tl.load(k_scales + head * WIDTH + dims, mask=wide, other=0.0)
        queries = (queries.to(tl.float32) * k_scale[None, :]).to(queries.dtype)
    elif HAS_LOW:
        q_sum = tl.sum(queries.to(tl.float32), 1)

    scores_max = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    lift = tl.zeros([M, 1], tl.float32)  # what results are shifted by
    acc = tl.zeros([M, V_WIDTH_PAD], tl.float32)
    last = context - fed + token  # the newest position that each query sees
    table = block_tables + row.to(tl.int64) * stride_table
    n = tl.arange(0, TILE)
    blocks = look_up(table, tile_begin * TILE, n, context, BLOCK_SIZE, TILE)
    for tile in tl.range(tile_begin, tile_end, num_stages=STAGES):
        first = tile * TILE
        inside = first + n < context
        slots = slots_of(blocks, first, n, BLOCK_SIZE, TILE) * num_kv_heads + head
        blocks = look_up(table, first + TILE, n, context, BLOCK_SIZE, TILE)
        keys = _load_numbers(k_cache, slots, inside, queries.dtype, WIDTH, WIDTH_PAD, PER_BYTE)
        values = _load_numbers(
            v_cache, slots, inside, queries.dtype, V_WIDTH, V_WIDTH_PAD, PER_BYTE
        )
        scores = product(queries, tl.trans(keys), None, EXACT)
        if not IS_STATIC:
            EACH: tl.constexpr = 2 if HAS_LOW else 1
            key_scale = tl.load(k_scales + slots * EACH, mask=inside, other=0.0).to(tl.float32)
            value_scale = tl.load(v_scales + slots * EACH, mask=inside, other=0.0).to(tl.float32)
            scores *= key_scale[None, :]
            if HAS_LOW:
                key_low = tl.load(k_scales + slots * 2 + 1, mask=inside, other=0.0).to(tl.float32)
                low = tl.load(v_scales + slots * 2 + 1, mask=inside, other=0.0).to(tl.float32)
                scores += q_sum[:, None] * key_low[None, :]
        scores = tl.where((first + n)[None, :] <= last[:, None], scores * scale, float("-inf"))
        weights, fade, scores_max, total = soften(scores, scores_max, total)
        if not IS_STATIC:
            if HAS_LOW:
                lift = lift * fade + tl.sum(weights * low[None, :], 1, keep_dims=True)
            weights *= value_scale[None, :]
        acc = product(weights.to(values.dtype), values, acc * fade, EXACT)

    if IS_STATIC:
        v_scale = tl.load(v_scales + head * V_WIDTH + v_dims, mask=v_wide, other=0.0)
        acc *= v_scale[None, :]
        if HAS_LOW:
            v_low = tl.load(v_lows + head * V_WIDTH + v_dims, mask=v_wide, other=0.0)
            acc += total[:, None] * v_low[None, :]
    elif HAS_LOW:
        acc += lift
    store_rows(
        out, acc, scores_max, total, part_acc, part_max, part_total, counters, row, split,
        num_splits,
        first_token, fed, num_kv_heads * GROUP, GROUP, M, ROWS, V_WIDTH, V_WIDTH_PAD,
    )  # fmt: skip
