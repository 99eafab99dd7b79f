"""What the attention kernels share: rotation while loading, and addresses in the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl

# Where running maxima start: finite, so that differences of two of them are defined.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def over_mean_square(x, eps, WIDTH: tl.constexpr):
    """[rows, 1]: what norms multiply rows with."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]


@triton.jit
def scaled(x, factor, norm, dims, END: tl.constexpr):
    """x * factor * norm[dims], dims below END."""
    weight = tl.load(norm + dims, mask=dims < END, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * factor * weight[None, :]).to(x.dtype)


@triton.jit
def load_rotated(
    base,
    rows,
    mask,
    positions,
    cos_sin,
    norm,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMS: tl.constexpr,
):
    """[rows, WIDTH_PAD] of a tensor whose last dimension is contiguous, rotated at `positions`,
    with NORMS over its root mean square and times the weights `norm` before.

    Each element is loaded together with its partner of the rotation, so nothing is exchanged
    between threads. ROTARY 0 rotates nothing. Arithmetic in float32, results in the tensor's dtype.
    """
    dims = tl.arange(0, WIDTH_PAD)
    inside = mask[:, None] & (dims < WIDTH)[None, :]
    x = tl.load(base + rows[:, None] + dims[None, :], mask=inside, other=0.0)
    if NORMS:
        factor = over_mean_square(x, eps, WIDTH)
        x = scaled(x, factor, norm, dims, WIDTH)
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        if INTERLEAVED:
            first = dims % 2 == 0
            partner = tl.where(first, dims + 1, dims - 1)
            frequency = dims // 2
        else:
            first = dims < HALF
            partner = tl.where(first, dims + HALF, dims - HALF)
            frequency = tl.where(first, dims, dims - HALF)
        turns = mask[:, None] & (dims < ROTARY)[None, :]
        other = tl.load(base + rows[:, None] + partner[None, :], mask=turns, other=0.0)
        if NORMS:
            other = scaled(other, factor, norm, partner, ROTARY)
        table = cos_sin + positions[:, None] * ROTARY + frequency[None, :]
        cos = tl.load(table, mask=turns, other=1.0)
        sin = tl.load(table + HALF, mask=turns, other=0.0)
        sin = tl.where(first[None, :], -sin, sin)
        x = (x.to(tl.float32) * cos + other.to(tl.float32) * sin).to(x.dtype)
    return x


@triton.jit
def look_up(table, first_token, offsets, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Blocks of the tokens first_token + offsets of one sequence; one number where a tile lies
    within one block. From `end` on: block 0, and the table is not read.

    Loops look up the next tile's blocks while they fetch the keys of this one: addresses that came
    from a load of the same turn would keep the compiler from fetching ahead.
    """
    if BLOCK_SIZE % TILE == 0:
        at = table + first_token // BLOCK_SIZE
        blocks = tl.load(at, mask=first_token < end, other=0, cache_modifier=".cg")
    else:
        tokens = first_token + offsets
        at = table + tokens // BLOCK_SIZE
        blocks = tl.load(at, mask=tokens < end, other=0, cache_modifier=".cg")
    return blocks


@triton.jit
def slots_of(blocks, first_token, offsets, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Slots of the tokens, of what look_up found."""
    if BLOCK_SIZE % TILE == 0:
        return blocks.to(tl.int64) * BLOCK_SIZE + (first_token % BLOCK_SIZE + offsets)
    return blocks.to(tl.int64) * BLOCK_SIZE + (first_token + offsets) % BLOCK_SIZE


@triton.jit
def product(a, b, acc, EXACT: tl.constexpr):
    """acc + a b, float32 operands without shortened mantissas."""
    if EXACT:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def first_key_of(token, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Of the keys that the token of that index sees, the first; 0 without a window and chunks."""
    first = token * 0
    if WINDOW > 0:
        first = tl.maximum(token - (WINDOW - 1), 0)
    if CHUNK > 0:
        first = token // CHUNK * CHUNK
    return first


@triton.jit
def capped(scores, cap, SOFTCAP: tl.constexpr):
    """cap * tanh(scores / cap), float32. By its series where the quotient of exponentials would
    lose digits."""
    if SOFTCAP:
        x = scores / cap
        square = x * x
        small = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
        large = 1 - 2 / (tl.exp2(x * 2.8853900817779268) + 1)
        scores = cap * tl.where(square < 0.01, small, large)
    return scores


@triton.jit
def start_of_softmax(
    sinks, heads, is_first, M: tl.constexpr, SINKS: tl.constexpr
):  # fmt: skip
    """Maximum and total of M running softmaxes (base 2) before any key; with SINKS they hold the
    heads' own logits, where `is_first`."""
    scores_max = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + heads) * 1.4426950408889634
        scores_max = tl.where(is_first, tl.maximum(sink, LOWEST), scores_max)
        total = tl.where(is_first, 1.0, total)
    return scores_max, total


@triton.jit
def soften(scores, scores_max, total):
    """One step of a running softmax (base 2): weights of these keys, what is to be multiplied with
    what values were summed to before, maxima and totals."""
    new_max = tl.maximum(scores_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    fade = tl.exp2(scores_max - new_max)
    return weights, fade[:, None], new_max, total * fade + tl.sum(weights, 1)
