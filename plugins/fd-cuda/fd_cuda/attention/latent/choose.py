"""What an indexer chooses (DeepSeek V3.2, arXiv 2512.02556): a score of each key that a token sees,
then the slots of the keys whose scores are the largest.

Tokens that see no more keys than are chosen get all of them, and no scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fd_cuda.attention.common import product
from fd_cuda.kernels.common import join_chain


@triton.jit(do_not_specialize=["first", "width", "stride_table"])
def index_scores(
    q,
    weights,
    keys,
    rows,
    seen,
    tables,
    scores,
    first,
    width,
    stride_q,
    stride_q_head,
    stride_weights,
    stride_table,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """scores[token - first, key] float32: the sum over heads of weight * relu(query . key), for
    keys that the token sees. Grid (tokens from `first` on, programs that
    take turns with tiles of keys).

    rows, seen: [tokens] int32, a token's row of `tables`, and how many keys of that row it sees.
    """
    join_chain(PDL)
    token = (first + tl.program_id(0)).to(tl.int64)
    count = tl.load(seen + token)
    head, dims = tl.arange(0, HEADS_PAD), tl.arange(0, DIM_PAD)
    is_head, wide = head < HEADS, (dims < DIM)[None, :]
    places = q + token * stride_q + (head * stride_q_head)[:, None] + dims[None, :]
    asked = tl.load(places, mask=is_head[:, None] & wide, other=0.0)
    own = tl.load(weights + token * stride_weights + head, mask=is_head, other=0.0)
    table = tables + tl.load(rows + token).to(tl.int64) * stride_table
    tiles = tl.where(count > TOP_K, tl.cdiv(count, TILE), 0)
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        key = tile * TILE + tl.arange(0, TILE)
        inside = key < count
        blocks = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slots = blocks * BLOCK_SIZE + key % BLOCK_SIZE
        k = tl.load(
            keys + (slots * DIM)[:, None] + dims[None, :], mask=inside[:, None] & wide, other=0.0
        )
        each = product(asked, tl.trans(k), None, EXACT)
        total = tl.sum(tl.maximum(each, 0.0) * own[:, None], 0)
        tl.store(scores + tl.program_id(0).to(tl.int64) * width + key, total, mask=inside)


@triton.jit
def _ranks(scores, inside):
    """Integers in the order of the scores; of equal ones 0.0 and -0.0 are one."""
    x = tl.load(scores, mask=inside, other=0.0)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit(do_not_specialize=["first", "width", "stride_table"])
def choose_keys(
    scores,
    rows,
    seen,
    tables,
    chosen,
    first,
    width,
    stride_table,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """chosen[token, :] int32: slots of the TOP_K keys with the largest scores, of equal ones the
    earlier, in their order; of all that the token sees where those are no more. Grid (tokens,).

    The smallest score that counts is found byte by byte, by how many scores have each next one.
    """
    join_chain(PDL)
    token = (first + tl.program_id(0)).to(tl.int64)
    count = tl.load(seen + token)
    table = tables + tl.load(rows + token).to(tl.int64) * stride_table
    scores += tl.program_id(0).to(tl.int64) * width
    n, digits = tl.arange(0, SPAN), tl.arange(0, 256)
    least = tl.zeros((), tl.uint32)
    room = tl.zeros((), tl.int32) + TOP_K
    if count > TOP_K:
        for shift in tl.static_range(24, -1, -8):
            counts = tl.zeros([256], tl.int32)
            for begin in range(0, count, SPAN):
                inside = begin + n < count
                ranks = _ranks(scores + begin + n, inside)
                if shift < 24:
                    inside &= ranks >> (shift + 8) == least
                digit = (ranks >> shift & 255).to(tl.int32)
                counts += tl.histogram(digit, 256, mask=inside)
            above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
            is_last = (above < room) & (above + counts >= room)
            least = least << 8 | tl.sum(tl.where(is_last, digits, 0), 0).to(tl.uint32)
            room -= tl.sum(tl.where(is_last, above, 0), 0)
    taken, level = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for begin in range(0, count, SPAN):
        key = begin + n
        inside = key < count
        is_chosen = inside
        if count > TOP_K:
            ranks = _ranks(scores + key, inside)
            ties = ((ranks == least) & inside).to(tl.int32)
            before = level + tl.cumsum(ties, 0) - ties
            is_chosen = inside & ((ranks > least) | ((ties > 0) & (before < room)))
            level += tl.sum(ties, 0)
        marks = is_chosen.to(tl.int32)
        at = taken + tl.cumsum(marks, 0) - marks
        blocks = tl.load(table + key // BLOCK_SIZE, mask=is_chosen, other=0)
        slots = blocks * BLOCK_SIZE + key % BLOCK_SIZE
        tl.store(chosen + token * TOP_K + at, slots, mask=is_chosen & (at < TOP_K))
        taken += tl.sum(marks, 0)
