"""Kernels of recurrences over states [key, value]; contracts/attention.py has the formulae.

Rows of few tokens take one token after the other: step_states. Longer ones are cut into chunks at
multiples of CHUNK from the sequence's beginning: within_chunks computes what no state is needed
for, all chunks at once, and scan_chunks passes the state through a row's chunks. A row's chunks do
not depend on how its tokens were divided among steps, if those end at multiples of CHUNK.

States are float32 in registers. Products of 16-bit models round their factors to 16 bits, and the
inverse within a chunk keeps float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fd_cuda.kernels.common import join_chain

CHUNK = 64


@triton.jit
def softplus(x):
    """log(1 + e^x), float32, with all its digits where it is small, too."""
    small = tl.exp(-tl.abs(x))
    above = 1 + small
    log = tl.where(above == 1, small, tl.log(above) * (small / (above - 1)))
    return tl.maximum(x, 0) + log


@triton.jit
def product(a, b, acc):
    """acc + a b. Factors in float32 are multiplied as sums of three shorter numbers, which keeps
    all but the last of their digits."""
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def block_of(table, token, BLOCK_SIZE: tl.constexpr):
    """The block that a sequence's state after that token is in."""
    return tl.load(table + tl.maximum(token, 0) // BLOCK_SIZE).to(tl.int64)


@triton.jit
def place_of(table, length, BLOCK_SIZE: tl.constexpr, KEPT: tl.constexpr):
    """Where a sequence's state after its first `length` tokens is: its block has places for KEPT
    states, which take turns."""
    return block_of(table, length - 1, BLOCK_SIZE) * KEPT + length % KEPT


@triton.jit
def chunk_of(number, start, end, CHUNK: tl.constexpr):
    """(first token, number of tokens) of a row's chunk, by their index in the row; the row has the
    sequence's tokens start to end."""
    begin = (start // CHUNK + number) * CHUNK
    first = tl.maximum(begin, start)
    return first - start, tl.minimum(begin + CHUNK, end) - first


@triton.jit(do_not_specialize=["stride_table"])
def step_states(
    x,
    dt,
    beta,
    decay,
    dt_bias,
    skip,
    out,
    state,
    starts,
    lengths,
    tables,
    slots,
    stride_x,
    stride_dt,
    stride_beta,
    stride_table,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    Q_AT: tl.constexpr,
    K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    MOST: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of up to MOST tokens, of whose states the last KEPT stay. Grid (blocks of VALUES values,
    heads, rows).

    x: [tokens, channels], convolved, q and k of length 1; q, k and v begin at channels Q_AT, K_AT
    and V_AT. EACH neighbouring heads have a key head. CHANNELS: each row of a state has a decay of
    its own. Padding rows give zeros. slots: below 0 for
    padding at a row's end, which leaves no state.
    """
    join_chain(PDL)
    head, row = tl.program_id(1), tl.program_id(2)
    first, length = tl.load(starts + row), tl.load(lengths + row)
    count = tl.load(starts + row + 1) - first
    keys = tl.arange(0, KEY_PAD)
    values = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY, values < VALUE
    own = head.to(tl.int64) * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
    inside = is_key[:, None] & is_value[None, :]
    if length == 0:
        for token in range(count):
            at = (first + token).to(tl.int64) * (HEADS * VALUE) + head * VALUE + values
            tl.store(out + at, tl.zeros([VALUES], out.dtype.element_ty), mask=is_value)
    if (length > 0) & (count > 0) & (count <= MOST):
        start = length - count
        table = tables + row.to(tl.int64) * stride_table
        source = place_of(table, start, BLOCK_SIZE, KEPT)
        size: tl.constexpr = HEADS * KEY * VALUE
        s = tl.load(state + source * size + own, mask=inside & (start > 0), other=0.0)
        s = s.to(tl.float32)
        rate = tl.load(decay + head)
        if CHANNELS:
            of_dt = head * KEY + keys
            bias = tl.load(dt_bias + of_dt, mask=is_key, other=0.0)
        else:
            of_dt, bias = head, tl.load(dt_bias + head)
        for token in range(count):
            at = (first + token).to(tl.int64)
            of_key = x + at * stride_x + (head // EACH) * KEY + keys
            q = tl.load(of_key + Q_AT, mask=is_key, other=0.0).to(tl.float32)
            k = tl.load(of_key + K_AT, mask=is_key, other=0.0).to(tl.float32)
            of_value = x + at * stride_x + V_AT + head * VALUE + values
            v = tl.load(of_value, mask=is_value, other=0.0).to(tl.float32)
            if CHANNELS:
                wide = tl.load(dt + at * stride_dt + of_dt, mask=is_key, other=0.0)
                t = softplus(wide.to(tl.float32) + bias)
                s = s * tl.exp(rate * t)[:, None]
            else:
                t = softplus(tl.load(dt + at * stride_dt + of_dt).to(tl.float32) + bias)
                s = s * tl.exp(rate * t)
            if DELTA:
                b = tl.sigmoid(tl.load(beta + at * stride_beta + head).to(tl.float32))
                new = b * (v - tl.sum(s * k[:, None], 0))
            else:
                new = t * v
            s = s + k[:, None] * new[None, :]
            y = tl.sum(s * q[:, None], 0)
            if not DELTA:
                y = y + tl.load(skip + head) * v
            place = out + at * (HEADS * VALUE) + head * VALUE + values
            tl.store(place, y.to(out.dtype.element_ty), mask=is_value)
            is_fed = KEPT == 1
            if KEPT > 1:
                is_fed = tl.load(slots + at) >= 0
            if (count - token <= KEPT) & is_fed:
                target = place_of(table, start + token + 1, BLOCK_SIZE, KEPT)
                tl.store(state + target * size + own, s.to(state.dtype.element_ty), mask=inside)


@triton.jit
def quarters(x, SIZE: tl.constexpr):
    """Of a batch of squares of twice SIZE: top left, bottom left, bottom right."""
    x = tl.reshape(x, [x.shape[0], 2, SIZE, 2, SIZE])
    left, right = tl.split(tl.permute(x, (0, 2, 4, 1, 3)))
    top, bottom = tl.split(left)
    _, corner = tl.split(right)
    return top, bottom, corner


@triton.jit
def joined(top, bottom, corner, SIZE: tl.constexpr):
    """The squares of such quarters; what is right of the top is 0."""
    x = tl.join(tl.join(top, bottom), tl.join(tl.zeros_like(top), corner))
    return tl.reshape(tl.permute(x, (0, 3, 1, 4, 2)), [top.shape[0], 2 * SIZE, 2 * SIZE])


@triton.jit
def inverse(lower, CHUNK: tl.constexpr):
    """(1 + lower)^-1; lower, 64 by 64, is zero on and above its diagonal. The inverses of blocks of
    twice the size come from those of half the size, which is as stable as one row after the
    other: within blocks of 16 by masks, and from there by products of blocks alone."""
    top, beside_32, corner = quarters(tl.reshape(lower, [1, CHUNK, CHUNK]), 32)
    x = tl.reshape(tl.permute(tl.join(top, corner), (0, 3, 1, 2)), [2, 32, 32])
    top, beside_16, corner = quarters(x, 16)
    small = tl.reshape(tl.permute(tl.join(top, corner), (0, 3, 1, 2)), [4, 16, 16])
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    pairs = (i % 2 == 1) & (j == i - 1)
    found = tl.where(i == j, 1.0, 0.0) - tl.where(pairs, small, 0.0)
    for level in tl.static_range(1, 4):
        size = 2**level
        beside = (i // size % 2 == 1) & (j // size == i // size - 1)
        part = product(tl.where(beside, small, 0.0), found, None)
        found = found - product(found, part, None)
    first, second = tl.split(tl.permute(tl.reshape(found, [2, 2, 16, 16]), (0, 2, 3, 1)))
    below = -product(second, product(beside_16, first, None), None)
    x = joined(first, below, second, 16)
    first, second = tl.split(tl.permute(tl.reshape(x, [1, 2, 32, 32]), (0, 2, 3, 1)))
    # As matrices, not as batches of one: all warps would hold all of those.
    left, right = tl.reshape(second, [32, 32]), tl.reshape(first, [32, 32])
    part = product(tl.reshape(beside_32, [32, 32]), right, None)
    below = tl.reshape(-product(left, part, None), [1, 32, 32])
    return tl.reshape(joined(first, below, second, 32), [CHUNK, CHUNK])


@triton.jit
def faded_products(
    q, k, c, k_rows, sums, edges, of_key, is_key, count, stride_k, stride_sum,
    CHUNK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Sums over keys of e^(c_i - c_j) q_i k_j and of e^(c_i - c_j) k_i k_j, for j up to i. k_rows,
    sums: where k and c of the chunk's `count` tokens were loaded from; edges: c of the first one.

    Between parts of PART tokens the exponent is divided: e^(c_i - r) e^(r - c_j) with r the sum at
    the end of the part before token i's, so that neither is above 0 and products of matrices do;
    within a part, column by column.
    """
    i = tl.arange(0, CHUNK)
    kind: tl.constexpr = k.dtype
    q, k = q.to(tl.float32), k.to(tl.float32)
    y = tl.zeros([CHUNK, CHUNK], tl.float32)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    for part in range(1, CHUNK // PART):
        edge = part * PART - 1
        r = tl.load(edges + edge * stride_sum, mask=is_key & (edge < count), other=0.0)
        own = (i // PART == part)[:, None]
        since = tl.where(own, tl.exp(tl.minimum(c - r[None, :], 0.0)), 0.0)
        until = tl.exp(tl.minimum(r[None, :] - c, 0.0))
        earlier = tl.trans(tl.where((i <= edge)[:, None], k * until, 0.0).to(kind))
        y = product((q * since).to(kind), earlier, y)
        pairs = product((k * since).to(kind), earlier, pairs)
    for nth in range(PART):
        column = i // PART * PART + nth
        back = (column - i)[:, None]
        mask = (back <= 0) & of_key
        other = tl.load(k_rows + back * stride_k, mask=mask, other=0.0).to(tl.float32)
        faded = tl.load(sums + back * stride_sum, mask=mask, other=0.0)
        other = tl.where(mask, other * tl.exp(tl.minimum(c - faded, 0.0)), 0.0)
        here = column[:, None] == i[None, :]
        y = tl.where(here, tl.sum(q * other, 1)[:, None], y)
        pairs = tl.where(here, tl.sum(k * other, 1)[:, None], pairs)
    return y, pairs


@triton.jit(do_not_specialize_on_alignment=["chunks"])
def within_chunks(
    x,
    dt,
    beta,
    decay,
    dt_bias,
    sums,
    inner,
    wanted,
    read,
    starts,
    lengths,
    chunks,
    stride_x,
    stride_dt,
    stride_beta,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    Q_AT: tl.constexpr,
    K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """What chunks need of themselves. Grid (chunks, heads).

    Of token i, with c the sum of decays up to it: inner[i, j] = e^(c_i - c_j) q_i k_j for j up to
    i; and of "delta", with A[i, j] = b_i e^(c_i - c_j) k_i k_j for j before i,
    wanted = (1 + A)^-1 b v and read = (1 + A)^-1 b e^c k. Shapes [tokens, heads, ...], x's dtype.
    CHANNELS: each row of a state has decays of its own, whose sums are `sums`; else that is None.
    """
    join_chain(PDL)
    item, head = chunks + tl.program_id(0) * 2, tl.program_id(1)
    row, number = tl.load(item), tl.load(item + 1)
    first, end = tl.load(starts + row), tl.load(lengths + row)
    start = end - (tl.load(starts + row + 1) - first)
    begin, count = chunk_of(number, start, end, CHUNK)
    i = tl.arange(0, CHUNK)
    at, real = (first + begin + i).to(tl.int64), i < count
    keys, values = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    of_key = real[:, None] & (keys < KEY)[None, :]
    rows = x + at[:, None] * stride_x + (head // EACH) * KEY + keys[None, :]
    q = tl.load(rows + Q_AT, mask=of_key, other=0.0)
    k = tl.load(rows + K_AT, mask=of_key, other=0.0)
    if CHANNELS:
        edges = sums + ((first + begin).to(tl.int64) * HEADS + head) * KEY + keys
        sums += (at[:, None] * HEADS + head) * KEY + keys[None, :]
        c = tl.load(sums, mask=of_key, other=0.0)
        y, pairs = faded_products(
            q, k, c, rows + K_AT, sums, edges, of_key, keys < KEY, count, stride_x, HEADS * KEY,
            CHUNK, PART,
        )  # fmt: skip
    else:
        step = tl.load(dt + at * stride_dt + head, mask=real, other=0.0).to(tl.float32)
        g = tl.load(decay + head) * softplus(step + tl.load(dt_bias + head))
        c = tl.cumsum(tl.where(real, g, 0.0), 0)
        between = c[:, None] - c[None, :]
        seen = i[:, None] >= i[None, :]
        fade = tl.where(seen, tl.exp(tl.where(seen, between, 0.0)), 0.0)
        y = product(q, tl.trans(k), None) * fade
    places = inner + (at * HEADS + head)[:, None] * CHUNK + i[None, :]
    tl.store(places, y.to(inner.dtype.element_ty), mask=real[:, None])
    if DELTA:
        if not CHANNELS:
            pairs = product(k, tl.trans(k), None) * fade
        b = tl.load(beta + at * stride_beta + head, mask=real, other=0.0).to(tl.float32)
        b = tl.sigmoid(b)[:, None]
        before = tl.where(i[:, None] > i[None, :], b * pairs, 0.0)
        whole = inverse(before, CHUNK).to(x.dtype.element_ty)
        # Loaded only now: beside the inverse there is no room in registers.
        of_value = real[:, None] & (values < VALUE)[None, :]
        v_rows = x + at[:, None] * stride_x + V_AT + head * VALUE + values[None, :]
        v = tl.load(v_rows, mask=of_value, other=0.0).to(tl.float32)
        own = product(whole, (b * v).to(x.dtype.element_ty), None)
        places = wanted + (at * HEADS + head)[:, None] * VALUE + values[None, :]
        tl.store(places, own.to(wanted.dtype.element_ty), mask=of_value)
        k = tl.load(rows + K_AT, mask=of_key, other=0.0).to(tl.float32)
        since = tl.exp(c) if CHANNELS else tl.exp(c)[:, None]
        reads = product(whole, (b * since * k).to(x.dtype.element_ty), None)
        places = read + (at * HEADS + head)[:, None] * KEY + keys[None, :]
        tl.store(places, reads.to(read.dtype.element_ty), mask=of_key)


@triton.jit(do_not_specialize_on_alignment=["chunks"])
def sum_decays(
    dt,
    decay,
    dt_bias,
    sums,
    starts,
    lengths,
    chunks,
    stride_dt,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums [tokens, heads, KEY] float32: of "channel_delta", the decays of each row of the state
    from the chunk's first token up to a token. Grid (chunks, heads)."""
    join_chain(PDL)
    item, head = chunks + tl.program_id(0) * 2, tl.program_id(1)
    row, number = tl.load(item), tl.load(item + 1)
    first, end = tl.load(starts + row), tl.load(lengths + row)
    start = end - (tl.load(starts + row + 1) - first)
    begin, count = chunk_of(number, start, end, CHUNK)
    i, keys = tl.arange(0, CHUNK), tl.arange(0, KEY_PAD)
    at, is_key = (first + begin + i).to(tl.int64), keys < KEY
    inside = (i < count)[:, None] & is_key[None, :]
    places = dt + at[:, None] * stride_dt + head * KEY + keys[None, :]
    step = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + head * KEY + keys, mask=is_key, other=0.0)
    g = tl.load(decay + head) * softplus(step + bias[None, :])
    c = tl.cumsum(tl.where(inside, g, 0.0), 0)
    tl.store(sums + (at * HEADS + head)[:, None] * KEY + keys[None, :], c, mask=inside)


@triton.jit(do_not_specialize=["stride_table"])
def scan_chunks(
    x,
    dt,
    decay,
    dt_bias,
    skip,
    inner,
    wanted,
    read,
    sums,
    out,
    state,
    starts,
    lengths,
    tables,
    long_rows,
    stride_x,
    stride_dt,
    stride_table,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    Q_AT: tl.constexpr,
    K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's chunks, one after the other, with what within_chunks left, and with CHANNELS
    sum_decays. Grid (blocks of VALUES values, heads, long rows)."""
    join_chain(PDL)
    head, row = tl.program_id(1), tl.load(long_rows + tl.program_id(2))
    first, end = tl.load(starts + row), tl.load(lengths + row)
    start = end - (tl.load(starts + row + 1) - first)
    i, keys = tl.arange(0, CHUNK), tl.arange(0, KEY_PAD)
    values = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY, values < VALUE
    table = tables + row.to(tl.int64) * stride_table
    size: tl.constexpr = HEADS * KEY * VALUE
    own = head.to(tl.int64) * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
    inside = is_key[:, None] & is_value[None, :]
    source = place_of(table, start, BLOCK_SIZE, KEPT)
    s = tl.load(state + source * size + own, mask=inside & (start > 0), other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    if not CHANNELS:
        bias, rate = tl.load(dt_bias + head), tl.load(decay + head)
    for number in range((end - 1) // CHUNK - start // CHUNK + 1):
        begin, count = chunk_of(number, start, end, CHUNK)
        at, real = (first + begin + i).to(tl.int64), i < count
        of_key = real[:, None] & is_key[None, :]
        of_value = real[:, None] & is_value[None, :]
        rows = x + at[:, None] * stride_x + (head // EACH) * KEY + keys[None, :]
        q = tl.load(rows + Q_AT, mask=of_key, other=0.0)
        k = tl.load(rows + K_AT, mask=of_key, other=0.0)
        if CHANNELS:
            of_sum = sums + head * KEY + keys
            c = tl.load(of_sum[None, :] + at[:, None] * (HEADS * KEY), mask=of_key, other=0.0)
            edge = (first + begin + count - 1).to(tl.int64)
            last = tl.load(of_sum + edge * (HEADS * KEY), mask=is_key, other=0.0)
            q = (q.to(tl.float32) * tl.exp(c)).to(kind)
        else:
            step = tl.load(dt + at * stride_dt + head, mask=real, other=0.0).to(tl.float32)
            t = tl.where(real, softplus(step + bias), 0.0)
            c = tl.cumsum(rate * t, 0)
            last = tl.sum(rate * t, 0)
        narrow = s.to(kind)
        if DELTA:
            places = wanted + (at * HEADS + head)[:, None] * VALUE + values[None, :]
            new = tl.load(places, mask=of_value, other=0.0).to(tl.float32)
            places = read + (at * HEADS + head)[:, None] * KEY + keys[None, :]
            new -= product(tl.load(places, mask=of_key, other=0.0), narrow, None)
        else:
            places = x + at[:, None] * stride_x + V_AT + head * VALUE + values[None, :]
            v = tl.load(places, mask=of_value, other=0.0).to(tl.float32)
            new = t[:, None] * v
        places = inner + (at * HEADS + head)[:, None] * CHUNK + i[None, :]
        mixed = tl.load(places, mask=real[:, None], other=0.0)
        y = product(q, narrow, None)
        if not CHANNELS:
            y = y * tl.exp(c)[:, None]
        y = product(mixed, new.to(kind), y)
        if not DELTA:
            y += tl.load(skip + head) * v
        places = out + (at * HEADS + head)[:, None] * VALUE + values[None, :]
        tl.store(places, y.to(out.dtype.element_ty), mask=of_value)
        if CHANNELS:
            k = (k.to(tl.float32) * tl.exp(tl.minimum(last[None, :] - c, 0.0))).to(kind)
            s = product(tl.trans(k), new.to(kind), s * tl.exp(last)[:, None])
        else:
            # Faded values, not keys: those come from memory as they are.
            faded = (new * tl.exp(last - c)[:, None]).to(kind)
            s = product(tl.trans(k), faded, s * tl.exp(last))
    target = place_of(table, end, BLOCK_SIZE, KEPT)
    tl.store(state + target * size + own, s.to(state.dtype.element_ty), mask=inside)
