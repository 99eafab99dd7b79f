"""The causal convolution in front of a recurrence, one filter per channel; and the last inputs,
which a sequence keeps between steps."""

from __future__ import annotations

import triton
import triton.language as tl

from fd_cuda.kernels.common import join_chain

from .recurrence import place_of


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["chunks"])
def convolve(
    x,
    weight,
    bias,
    out,
    kept,
    starts,
    lengths,
    tables,
    slots,
    chunks,
    stride_x,
    stride_table,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    UNIT_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    SCALE: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows, blocks of channels): rows of up to TOKENS tokens. Or, where CHUNK is above 0,
    (chunks, blocks of channels, CHUNK / TOKENS): rows of any length, TOKENS of them a program. Only
    the first program of a row reads what its sequence kept, so TOKENS is at least WIDTH - 1 there.

    The first UNIT_HEADS blocks are heads of HEAD channels, made vectors of length 1, and half of
    them, the queries, times SCALE. Padding rows give zeros. Of KEPT and slots see step_states.
    """
    join_chain(PDL)
    item, part = tl.program_id(0), tl.program_id(1)
    row, number = item, 0
    if CHUNK > 0:
        row, number = tl.load(chunks + item * 2), tl.load(chunks + item * 2 + 1)
    first, length = tl.load(starts + row), tl.load(lengths + row)
    fed = tl.load(starts + row + 1) - first
    start = length - fed
    begin, count = 0, fed
    if CHUNK > 0:
        begin = number * CHUNK + tl.program_id(2) * TOKENS
        count = tl.minimum(fed - begin, TOKENS)
    channels = tl.arange(0, BLOCK)
    is_channel = channels < CHANNELS
    if UNIT_HEADS > 0:
        is_unit = part < UNIT_HEADS
        is_channel = (channels < HEAD) | (not is_unit)
        others = UNIT_HEADS * HEAD + (part - UNIT_HEADS) * BLOCK
        channels += tl.where(is_unit, part * HEAD, others)
    else:
        channels += part * BLOCK
    is_channel = is_channel & (channels < CHANNELS)
    tokens = tl.arange(0, TOKENS)
    real = (tokens < count) & (count <= TOKENS)
    inside = real[:, None] & is_channel[None, :]
    places = out + (first + begin + tokens).to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    if length == 0:
        tl.store(places, tl.zeros([TOKENS, BLOCK], out.dtype.element_ty), mask=inside)
    if (length > 0) & (count > 0) & (count <= TOKENS):
        table = tables + row.to(tl.int64) * stride_table
        before: tl.constexpr = WIDTH - 1  # inputs that a sequence keeps
        rows = x + first.to(tl.int64) * stride_x + channels[None, :]
        source = place_of(table, start, BLOCK_SIZE, KEPT)
        old = kept + source * (before * CHANNELS) + channels[None, :]
        has_old = is_channel[None, :] & (start > 0)
        y = tl.zeros([TOKENS, BLOCK], tl.float32)
        if BIAS:
            of_channel = tl.load(bias + channels, mask=is_channel, other=0.0)
            y += of_channel.to(tl.float32)[None, :]
        for tap in tl.static_range(WIDTH):
            at = (begin + tokens + tap - before).to(tl.int64)[:, None]
            given = tl.load(rows + at * stride_x, mask=inside & (at >= 0), other=0.0)
            wide = given.to(tl.float32)
            if begin < before:
                earlier = tl.load(
                    old + (before + at) * CHANNELS, mask=inside & has_old & (at < 0), other=0.0
                )
                wide += earlier.to(tl.float32)
            filters = tl.load(weight + channels * WIDTH + tap, mask=is_channel, other=0.0)
            y += wide * filters.to(tl.float32)[None, :]
        if SILU:
            y *= tl.sigmoid(y)
        if UNIT_HEADS > 0:
            squares = tl.sum(tl.where(is_channel[None, :], y * y, 0.0), 1)
            factor = tl.rsqrt(squares + 1e-6) * tl.where(part < UNIT_HEADS // 2, SCALE, 1.0)
            y *= tl.where(is_unit, factor, 1.0)[:, None]
        tl.store(places, y.to(out.dtype.element_ty), mask=inside)
        if begin == 0:
            column = tl.arange(0, WIDTH_PAD)[:, None]
            is_kept = (column < before) & is_channel[None, :]
            earliest = fed
            if (KEPT > 1) & (CHUNK == 0):
                earliest = tl.maximum(fed - KEPT, 0) + 1
            for end in range(earliest, fed + 1):
                since = (end - before + column).to(tl.int64)
                left = tl.load(rows + since * stride_x, mask=is_kept & (since >= 0), other=0.0)
                older = tl.load(
                    old + (before + since) * CHANNELS,
                    mask=is_kept & has_old & (since < 0),
                    other=0.0,
                )
                is_fed = KEPT == 1
                if KEPT > 1:
                    is_fed = tl.load(slots + first + end - 1) >= 0
                tl.debug_barrier()  # all threads have read, as the last place may be the source
                if is_fed:
                    target = place_of(table, start + end, BLOCK_SIZE, KEPT)
                    kept_at = kept + target * (before * CHANNELS) + column * CHANNELS
                    tl.store(kept_at + channels[None, :], left + older.to(left.dtype), mask=is_kept)
