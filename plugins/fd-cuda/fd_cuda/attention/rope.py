"""Norm and rotate a step's keys, write keys and values to the cache: prefill before attention.

Queries that Triton kernels read are rotated here and not there: a program of the attention kernel
has few of them, and would wait for their angles before its first product. prompt_attention.cu
rotates its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fd_cuda.kernels.common import join_chain

from .common import load_rotated, over_mean_square, scaled


@triton.jit
def _turned(
    base, rows, mask, positions, cos_sin, norm, eps,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    """load_rotated, reading every value once where whole heads are rotated."""
    if ROTARY == WIDTH_PAD:
        HALF: tl.constexpr = WIDTH_PAD // 2
        half = tl.arange(0, HALF)
        inside = mask[:, None]
        table = cos_sin + positions[:, None] * ROTARY + half[None, :]
        cos = tl.load(table, mask=inside, other=1.0)
        sin = tl.load(table + HALF, mask=inside, other=0.0)
        dims = tl.arange(0, WIDTH_PAD)
        x = tl.load(base + rows[:, None] + dims[None, :], mask=inside, other=0.0)
        if NORMS:
            x = scaled(x, over_mean_square(x, eps, WIDTH), norm, dims, WIDTH)
        ROWS: tl.constexpr = x.shape[0]
        if INTERLEAVED:
            first, second = tl.split(tl.reshape(x.to(tl.float32), [ROWS, HALF, 2]))
        else:
            halves = tl.reshape(x.to(tl.float32), [ROWS, 2, HALF])
            first, second = tl.split(tl.permute(halves, [0, 2, 1]))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        if not INTERLEAVED:
            turned = tl.permute(turned, [0, 2, 1])
        return tl.reshape(turned, [ROWS, WIDTH_PAD]).to(x.dtype)
    return load_rotated(
        base,
        rows,
        mask,
        positions,
        cos_sin,
        norm,
        eps,
        WIDTH,
        WIDTH_PAD,
        ROTARY,
        INTERLEAVED,
        NORMS,
    )


@triton.jit(do_not_specialize=["num_rows", "num_queries"])
def rotate_and_write(
    q, k, v, q_rotated, k_cache, v_cache, out, slot_mapping, positions, cos_sin,
    q_norm, k_norm, eps, num_rows, num_queries, stride_q, stride_k, stride_v, stride_q_head,
    stride_k_head, stride_v_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, V_WIDTH_PAD: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORMS: tl.constexpr, ROWS: tl.constexpr,
    CLEARS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row is one kv head of one token, and after num_rows of these one query head of one token:
    grid (cdiv(num_rows, ROWS) + cdiv(num_queries, ROWS)). Results are [tokens, heads, WIDTH].
    CLEARS: zeros in out, [tokens, NUM_HEADS, V_WIDTH], for padding, whose queries nobody attends
    with: a kernel of its own would cost a launch for nothing in most steps."""
    join_chain(PDL)
    programs = tl.cdiv(num_rows, ROWS)
    dims, v_dims = tl.arange(0, WIDTH_PAD), tl.arange(0, V_WIDTH_PAD)
    wide = (dims < WIDTH)[None, :]
    if tl.program_id(0) >= programs:
        rows = (tl.program_id(0) - programs) * ROWS + tl.arange(0, ROWS)
        inside = rows < num_queries
        token, head = (rows // NUM_HEADS).to(tl.int64), rows % NUM_HEADS
        position = tl.load(positions + token, mask=inside, other=0)
        queries = _turned(
            q, token * stride_q + head * stride_q_head, inside, position, cos_sin,
            q_norm, eps, WIDTH, WIDTH_PAD, ROTARY, INTERLEAVED, NORMS,
        )  # fmt: skip
        own = rows.to(tl.int64)[:, None] * WIDTH + dims[None, :]
        tl.store(q_rotated + own, queries, mask=inside[:, None] & wide)
    else:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = rows < num_rows
        token, head = (rows // NUM_KV_HEADS).to(tl.int64), rows % NUM_KV_HEADS
        position = tl.load(positions + token, mask=inside, other=0)
        slot = tl.load(slot_mapping + token, mask=inside, other=-1)
        place = slot * NUM_KV_HEADS + head
        keys = _turned(
            k, token * stride_k + head * stride_k_head, inside, position, cos_sin,
            k_norm, eps, WIDTH, WIDTH_PAD, ROTARY, INTERLEAVED, NORMS,
        )  # fmt: skip
        kept = (inside & (slot >= 0))[:, None]
        tl.store(k_cache + place[:, None] * WIDTH + dims[None, :], keys, mask=kept & wide)
        v_wide = (v_dims < V_WIDTH)[None, :]
        at = token * stride_v + head * stride_v_head
        values = tl.load(
            v + at[:, None] + v_dims[None, :], mask=inside[:, None] & v_wide, other=0.0
        )
        tl.store(v_cache + place[:, None] * V_WIDTH + v_dims[None, :], values, mask=kept & v_wide)
        if CLEARS:
            GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
            zeros = tl.zeros([ROWS, V_WIDTH_PAD], out.dtype.element_ty)
            cleared = out + rows.to(tl.int64)[:, None] * (GROUP * V_WIDTH) + v_dims[None, :]
            is_padding = (inside & (slot < 0))[:, None] & v_wide
            for nth in range(GROUP):
                tl.store(cleared + nth * V_WIDTH, zeros, mask=is_padding)
