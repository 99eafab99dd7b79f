"""Rotation and the paged cache: kernels that move rows. All are batch-invariant."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import cdiv, join_chain, options, pad2


# Triton compiles a 1 in as a constant, which no variable of the kernel can replace.
@triton.jit(do_not_specialize=["num_heads", "num_k_heads"])
def _rotate(
    x_p, y_p, stride0, stride1, num_heads, k_p, k_y_p, k_stride0, k_stride1, num_k_heads,
    positions_p, cos_sin_p, programs,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS of a token's queries, or of its keys by what programs there are after `programs`."""
    join_chain(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part >= programs:
        x_p, y_p, stride0, stride1, num_heads = k_p, k_y_p, k_stride0, k_stride1, num_k_heads
        part -= programs
    heads = part * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK)
    half: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        is_first = dims % 2 == 0
        partner = tl.where(is_first, dims + 1, dims - 1)
        frequency = dims // 2
    else:
        is_first = dims < half
        partner = tl.where(is_first, dims + half, dims - half)
        frequency = tl.where(is_first, dims, dims - half)
    turns = dims < ROTARY
    angle = cos_sin_p + tl.load(positions_p + token) * ROTARY + frequency
    cos = tl.load(angle, mask=turns, other=1.0)
    sin = tl.load(angle + half, mask=turns, other=0.0)
    sin = tl.where(is_first, -sin, sin)
    start = x_p + token * stride0 + heads[:, None] * stride1
    mask = (heads < num_heads)[:, None] & (dims < WIDTH)[None, :]
    x = tl.load(start + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(start + partner[None, :], mask=mask & turns[None, :], other=0.0)
    y = x * cos[None, :] + other.to(tl.float32) * sin[None, :]
    place = y_p + (token * num_heads + heads[:, None]) * WIDTH + dims[None, :]
    tl.store(place, y.to(y_p.dtype.element_ty), mask=mask)


@triton.jit
def _kv_write(
    x_p, cache_p, slots_p, stride0, stride1, WIDTH: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_p + token)
    cols = tl.arange(0, BLOCK)
    mask = (cols < ROW) & (slot >= 0)
    place = token * stride0 + (cols // WIDTH) * stride1 + cols % WIDTH
    values = tl.load(x_p + place, mask=mask)
    tl.store(cache_p + slot * ROW + cols, values.to(cache_p.dtype.element_ty), mask=mask)


def rotary_embedding(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first R dimensions of each head turned by its token's angle, in float32: new tensors."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    (tokens, num_heads, width), num_k_heads = q.shape, k.shape[1]
    turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    turned_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if tokens:
        block = pad2(width)
        heads = min(pad2(num_heads), max(1, 2048 // block))
        programs = cdiv(num_heads, heads)
        _rotate[(tokens, programs + cdiv(num_k_heads, heads))](
            q, turned, q.stride(0), q.stride(1), num_heads,
            k, turned_k, k.stride(0), k.stride(1), num_k_heads,
            positions, cos_sin, programs,
            WIDTH=width, BLOCK=block, ROTARY=cos_sin.shape[1], HEADS=heads,
            INTERLEAVED=interleaved, **options(num_warps=4),
        )  # fmt: skip
    return turned, turned_k


def kv_write(
    rows: tuple[torch.Tensor, ...], cache: tuple[torch.Tensor, ...], slot_mapping: torch.Tensor
) -> None:
    """rows[i] [T, h, d] into cache[i] [blocks, block_size, h, d] at each token's slot; -1 is left
    out."""
    for x, pool in zip(rows, cache, strict=True):
        x = x if x.stride(-1) == 1 else x.contiguous()
        tokens, heads, width = x.shape
        if tokens:
            _kv_write[(tokens,)](
                x, pool, slot_mapping, x.stride(0), x.stride(1), WIDTH=width, ROW=heads * width,
                BLOCK=pad2(heads * width), **options(num_warps=4),
            )  # fmt: skip


@triton.jit
def _copy_parts(
    parts_p, other, stride, blocks_p, places_p,
    TILE: tl.constexpr, WORD: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Grid (pairs, parts, tiles). Addresses are numbers, since there is one for each pool."""
    word: tl.constexpr = tl.int64 if WORD == 8 else tl.uint8
    pair, part = tl.program_id(0), parts_p + tl.program_id(1) * 3
    size = tl.load(part + 2)
    here = (tl.load(part) + tl.load(blocks_p + pair) * size).to(tl.pointer_type(word))
    there = other + tl.load(places_p + pair) * stride + tl.load(part + 1)
    there = there.to(tl.pointer_type(word))
    at = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = at < size // WORD
    if OUT:
        tl.store(there + at, tl.load(here + at, mask=inside), mask=inside)
    else:
        tl.store(here + at, tl.load(there + at, mask=inside), mask=inside)


def move_blocks(
    parts: torch.Tensor,
    most: int,
    other: int,
    stride: int,
    blocks: torch.Tensor,
    places: torch.Tensor,
    *,
    word: int,
    is_out: bool,
) -> None:
    """Blocks of many pools, to or from memory at address `other`, in which each has `stride` bytes
    in one piece. parts: [pools, 3] int64: address, where in a piece its part is, bytes of the part,
    `most` at most; blocks and places: [M] int64. word: 8 if it divides all bytes, else 1."""
    tile = 16384 // word
    grid = blocks.shape[0], parts.shape[0], cdiv(most // word, tile)
    _copy_parts[(*grid,)](
        parts, other, stride, blocks, places, TILE=tile, WORD=word, OUT=is_out, num_warps=8
    )


@triton.jit
def _sum_tiles(words_p, blocks_p, sums_p, num_words, TILE: tl.constexpr):
    """Grid (blocks, tiles)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    row = words_p + tl.load(blocks_p + block) * num_words
    words = tl.load(row + at, mask=at < num_words, other=0).to(tl.int64)
    weights = (2 * at + 1).to(tl.int64) * 0x9E3779B1
    tl.store(sums_p + block * tl.num_programs(1) + tile, tl.sum(words * weights, 0))


def sum_blocks(words: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Of rows of words [N, W] int32 or uint8, named by blocks [M] int64: the sum of word w times
    (2w + 1) * 0x9E3779B1, modulo 2**64; [M] int64. Odd weights show each change of one word, and
    unlike ones that words changed places."""
    num_words = words.shape[1]
    tiles = cdiv(num_words, TILE := 4096)
    sums = torch.empty((blocks.shape[0], tiles), dtype=torch.int64, device=words.device)
    _sum_tiles[(blocks.shape[0], tiles)](words, blocks, sums, num_words, TILE=TILE, num_warps=8)
    return sums.sum(1)
