"""Latent attention (MLA, absorbed form): one latent row per token serves all heads.

Kernel `latent_attention` serves decode splits and prefill tiles alike; the step's own rows are in
the cache when it runs. The values are the first RANK columns of the keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fd_cuda.attention.common import LOWEST, look_up, product, slots_of, soften
from fd_cuda.attention.decode import store_rows
from fd_cuda.kernels.common import leave_chain


@triton.jit(do_not_specialize=["stride_table"])
def latent_attention(
    q,
    out,
    cache,
    items,
    block_tables,
    part_acc,
    part_max,
    part_total,
    counters,
    scale,
    stride_q,
    stride_q_head,
    stride_table,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    ITEM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (work items, head blocks). Rows of the matrix: the item's tokens times HEAD_BLOCK heads.
    ROWS (a power of two) of the M are used.

    Of an item, CONTEXT counts all the row's tokens, and NUM_TOKENS its last ones that are queries
    here.
    """
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

    m = tl.arange(0, M)
    token, head = m // HEAD_BLOCK, tl.program_id(1) * HEAD_BLOCK + m % HEAD_BLOCK
    mine = (token < fed) & (head < HEADS)
    at = (first_token + token).to(tl.int64)
    if PDL:
        gdc_wait()
    q_rows = q + (at * stride_q + head * stride_q_head)[:, None]
    dims, rope_dims = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    wide, rope_wide = (dims < RANK)[None, :], (rope_dims < ROPE)[None, :]
    queries = tl.load(q_rows + dims[None, :], mask=mine[:, None] & wide, other=0.0)
    turned = tl.load(q_rows + RANK + rope_dims[None, :], mask=mine[:, None] & rope_wide, other=0.0)

    scores_max = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, RANK_PAD], tl.float32)
    last = context - fed + token  # the newest position that each query sees
    table = block_tables + row.to(tl.int64) * stride_table
    n = tl.arange(0, TILE)
    blocks = look_up(table, tile_begin * TILE, n, context, BLOCK_SIZE, TILE)
    for tile in tl.range(tile_begin, tile_end, num_stages=STAGES):
        first = tile * TILE
        inside = (first + n < context)[:, None]
        slots = slots_of(blocks, first, n, BLOCK_SIZE, TILE)
        blocks = look_up(table, first + TILE, n, context, BLOCK_SIZE, TILE)
        rows = cache + (slots * (RANK + ROPE))[:, None]
        latent = tl.load(rows + dims[None, :], mask=inside & wide, other=0.0)
        rope = tl.load(rows + RANK + rope_dims[None, :], mask=inside & rope_wide, other=0.0)
        scores = product(queries, tl.trans(latent), None, EXACT)
        scores = product(turned, tl.trans(rope), scores, EXACT) * scale
        visible = (first + n)[None, :] <= last[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        weights, fade, scores_max, total = soften(scores, scores_max, total)
        acc = product(weights.to(latent.dtype), latent, acc * fade, EXACT)

    store_rows(
        out, acc, scores_max, total, part_acc, part_max, part_total, counters, row, split,
        num_splits,
        first_token, fed, HEADS, HEAD_BLOCK, M, ROWS, RANK, RANK_PAD,
    )  # fmt: skip
