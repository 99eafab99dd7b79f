"""Rotate a step's keys and write keys and values to the cache: the part of prefill before attention."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import load_rotated


@triton.jit
def rotate_and_write(
    k,
    v,
    k_rotated,
    k_cache,
    v_cache,
    slot_mapping,
    positions,
    cos_sin,
    num_rows,
    stride_k,
    stride_v,
    stride_k_head,
    stride_v_head,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    V_WIDTH_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (rows / ROWS); a row is one kv head of one token. k_rotated is [tokens, heads, WIDTH]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    token, head = (rows // NUM_KV_HEADS).to(tl.int64), rows % NUM_KV_HEADS
    position = tl.load(positions + token, mask=inside, other=0)
    slot = tl.load(slot_mapping + token, mask=inside, other=-1)
    place = slot * NUM_KV_HEADS + head
    dims, v_dims = tl.arange(0, WIDTH_PAD), tl.arange(0, V_WIDTH_PAD)
    keys = load_rotated(
        k,
        token * stride_k + head * stride_k_head,
        inside,
        position,
        cos_sin,
        WIDTH,
        WIDTH_PAD,
        ROTARY,
        INTERLEAVED,
    )
    wide = (dims < WIDTH)[None, :]
    kept = (inside & (slot >= 0))[:, None]
    tl.store(
        k_rotated + rows.to(tl.int64)[:, None] * WIDTH + dims[None, :],
        keys,
        mask=inside[:, None] & wide,
    )
    tl.store(k_cache + place[:, None] * WIDTH + dims[None, :], keys, mask=kept & wide)
    v_wide = (v_dims < V_WIDTH)[None, :]
    at = token * stride_v + head * stride_v_head
    values = tl.load(v + at[:, None] + v_dims[None, :], mask=inside[:, None] & v_wide, other=0.0)
    tl.store(v_cache + place[:, None] * V_WIDTH + v_dims[None, :], values, mask=kept & v_wide)
