"""Products of many rows with what adapters add: prompts.

A x of each row's own adapter is there already (lora.py). Rows of a tile follow each other, mostly
in one prompt, so it goes through few adapters: from the first of its rows' to the last. B times
that is added while the product is in registers, or where a kernel reads what the library multiplied
to apply the activation; else by a pass of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
import triton
import triton.language as tl

from . import many_rows
from .common import cdiv, join_chain, options, pad2

_GATED: Final = many_rows.Shape(64, 8, 3)
_PLAIN: Final = many_rows.Shape(128, 8, 3)


@dataclass(frozen=True, slots=True)
class Sums:
    """What a product's adapters need beside its input: inner [splits, T, parts * rank] float32,
    parts of A x in rows with an adapter; b [slots, N, rank]; where the product's parts end; the
    slots [T] of rows."""

    inner: torch.Tensor
    b: torch.Tensor
    ends: tuple[int, ...]
    slots: torch.Tensor


@triton.jit
def _added(
    total, inner_p, b_p, slots, rows, num_rows, part, columns, inside,
    N: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    SPLITS: tl.constexpr, PAIR: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """total [rows, WIDTH] with what adapters add to these columns of one part; with PAIR the second
    half of the columns is of the next part."""
    last = tl.max(slots, 0)
    first = tl.min(tl.where(slots < 0, last, slots), 0)
    both = tl.arange(0, RANK * 2 if PAIR else RANK)
    half, ranks = both // RANK, both % RANK
    own = (slots >= 0)[:, None] & (ranks < R)[None, :]
    sums = inner_p + rows[:, None] * RANKS + ((part + half) * R + ranks)[None, :]
    inner = tl.zeros(own.shape, dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        inner += tl.load(sums + split * num_rows.to(tl.int64) * RANKS, mask=own, other=0.0)
    inner = inner.to(b_p.dtype.element_ty)
    mask = inside[None, :] & (ranks < R)[:, None]
    if PAIR:
        mask &= half[:, None] == (tl.arange(0, WIDTH) * 2 // WIDTH)[None, :]
    b_tile = b_p + first.to(tl.int64) * N * R + columns[None, :] * R + ranks[:, None]
    if last >= 0:
        for slot in tl.range(first, last + 1, num_stages=1):
            b = tl.load(b_tile, mask=mask, other=0.0)
            b_tile += N * R
            own_inner = tl.where((slots == slot)[:, None], inner, 0.0).to(b.dtype)
            total = tl.dot(own_inner, b, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _finish(
    y_p, out_p, inner_p, b_p, slots_p, tiles_p, num_rows, y_stride,
    N: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    SPLITS: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y with what adapters add, in its place; GATED: silu(gate) * up of it, to out [T, N / 2]."""
    tile = tl.program_id(1) * 3
    part, end = tl.load(tiles_p + tile), tl.load(tiles_p + tile + 2)
    columns = tl.load(tiles_p + tile + 1) + tl.arange(0, BN)
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    join_chain(PDL)
    slots = tl.load(slots_p + rows, mask=rows < num_rows, other=-1)
    if GATED or tl.max(slots, 0) >= 0:
        inside = columns < end
        mask = (rows < num_rows)[:, None] & inside[None, :]
        y_tile = y_p + rows[:, None] * y_stride + columns[None, :]
        y = tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)
        y = _added(
            y, inner_p, b_p, slots, rows, num_rows, part, columns, inside,
            N, R, RANKS, RANK, SPLITS, False, BN,
        )  # fmt: skip
        if GATED:
            up = tl.load(y_tile + N // 2, mask=mask, other=0.0).to(tl.float32)
            up = _added(
                up, inner_p, b_p, slots, rows, num_rows, part + 1, columns + N // 2, inside,
                N, R, RANKS, RANK, SPLITS, False, BN,
            )  # fmt: skip
            y = y / (1.0 + tl.exp(-y)) * up
            y_tile = out_p + rows[:, None] * (N // 2) + columns[None, :]
        else:
            mask &= (slots >= 0)[:, None]
        tl.store(y_tile, y.to(out_p.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_tiles, w_tiles, y_p, inner_p, b_p, slots_p, tiles_p, num_rows, depth, num_tiles,
    N: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    SPLITS: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BM rows times BN outputs, or pairs of gate and up, as many_rows computes them."""
    WIDTH: tl.constexpr = BN * 2 if GATED else BN
    block, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles * 3
    part, end = tl.load(tiles_p + tile), tl.load(tiles_p + tile + 2)
    start = tl.load(tiles_p + tile + 1)
    rows = (block * BM + tl.arange(0, BM)).to(tl.int64)
    join_chain(PDL)
    total = tl.zeros((BM, WIDTH), tl.float32)
    for k in tl.range(0, depth, BK, num_stages=STAGES):
        a = x_tiles.load([block * BM, k])
        if GATED:
            b = w_tiles.load([0, start, k]).reshape(WIDTH, BK)
        else:
            b = w_tiles.load([start, k])
        total = tl.dot(a, b.T, total)
    slots = tl.load(slots_p + rows, mask=rows < num_rows, other=-1)
    wide = tl.arange(0, WIDTH)
    columns = start + wide % BN + wide // BN * (N // 2)
    total = _added(
        total, inner_p, b_p, slots, rows, num_rows, part, columns, start + wide % BN < end,
        N, R, RANKS, RANK, SPLITS, GATED, WIDTH,
    )  # fmt: skip
    if GATED:
        gate, up = total.reshape(BM, 2, BN).permute(0, 2, 1).split()
        total = gate / (1.0 + tl.exp(-gate)) * up
    columns = start + tl.arange(0, BN)
    y = y_p + rows[:, None] * (N // 2 if GATED else N) + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < end)[None, :]
    tl.store(y, total.to(y_p.dtype.element_ty), mask=mask)


def product(x: torch.Tensor, weight: torch.Tensor, sums: Sums, *, is_gated: bool) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, and what adapters add; is_gated: silu(gate) * up of
    it. For what many_rows.dense_gated can compute."""
    num_rows, (width, depth) = x.shape[0], weight.shape
    shape = _GATED if is_gated else _PLAIN
    y = torch.empty((num_rows, width >> is_gated), dtype=x.dtype, device=x.device)
    tiles, num_tiles = tiles_of(_ends(sums, is_gated=is_gated), shape.columns, x.device)
    x_tiles = many_rows.row_tiles(x, many_rows.ROWS)
    of_weight = many_rows.gate_tiles if is_gated else many_rows.row_tiles
    _product[(cdiv(num_rows, many_rows.ROWS) * num_tiles,)](
        x_tiles, of_weight(weight, shape.columns), y, sums.inner, sums.b, sums.slots, tiles,
        num_rows, depth, num_tiles, **_sizes(sums), GATED=is_gated, BM=many_rows.ROWS,
        BN=shape.columns, BK=many_rows.DEPTH, STAGES=shape.stages,
        **options(num_warps=shape.warps),
    )  # fmt: skip
    return y


def finish(y: torch.Tensor, sums: Sums, *, is_gated: bool) -> torch.Tensor:
    """y [T, N], a product without adapters, with what they add, in its memory; is_gated: silu(gate)
    * up of it."""
    num_rows, width = y.shape
    out = y
    if is_gated:
        out = torch.empty((num_rows, width // 2), dtype=y.dtype, device=y.device)
    rows, columns = 64 if sums.b.shape[2] <= 64 else 16, 64 if is_gated else 128
    tiles, num_tiles = tiles_of(_ends(sums, is_gated=is_gated), columns, y.device)
    _finish[(cdiv(num_rows, rows), num_tiles)](
        y, out, sums.inner, sums.b, sums.slots, tiles, num_rows, y.stride(0), **_sizes(sums),
        GATED=is_gated, BM=rows, BN=columns, **options(num_warps=4),
    )  # fmt: skip
    return out


def _ends(sums: Sums, *, is_gated: bool) -> tuple[int, ...]:
    """Of parts; of pairs, the gates'."""
    return sums.ends[:1] if is_gated else sums.ends


def _sizes(sums: Sums) -> dict[str, int]:
    splits, _, ranks = sums.inner.shape
    _, width, rank = sums.b.shape
    return {"N": width, "R": rank, "RANKS": ranks, "RANK": max(16, pad2(rank)), "SPLITS": splits}


@functools.cache
def tiles_of(ends: tuple[int, ...], columns: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """[tiles, 3] int32: the part that each tile of outputs belongs to, its first output, and where
    the part ends."""
    found = [
        (part, first, end)
        for part, (start, end) in enumerate(pairwise((0, *ends)))
        for first in range(start, end, columns)
    ]
    return torch.tensor(found, dtype=torch.int32, device=device), len(found)
