"""The operation `lora` of fd-lora: what adapters add to a product, each row with its own or none.

Rows are not sorted: a program takes one adapter, finds the rows that have it, and ends at once
where there are none. So nothing that was captured depends on who has which.

Few rows: one launch, a program for each adapter and each tile of outputs, which computes A x anew;
that costs less than a second launch. Many rows: A x first, then its products, by tiles of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl

from .common import cdiv, join_chain, options, pad2

_MANY = 257  # rows from which A x is computed once


@triton.jit
def _inner(
    x_p, w_p, a_p, rows, mine, slot, part, x_stride, eps,
    K: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A x of these rows, [BM, RANK] float32; with NORM of x over its root mean square, times w."""
    ranks = tl.arange(0, RANK)
    a_p += (slot * PARTS + part).to(tl.int64) * R * K
    x_p += rows.to(tl.int64)[:, None] * x_stride
    inner = tl.zeros((BM, RANK), dtype=tl.float32)
    squares = tl.zeros((BM,), dtype=tl.float32)
    for start in range(0, K, BK):
        cols = start + tl.arange(0, BK)
        inside = cols < K
        x = tl.load(x_p + cols[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
        a_mask = (ranks < R)[:, None] & inside[None, :]
        a = tl.load(a_p + ranks[:, None] * K + cols[None, :], mask=a_mask, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            wide *= tl.load(w_p + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
            if x.dtype == tl.float16:  # whose range the product may leave
                inner = tl.dot(wide, tl.trans(a.to(tl.float32)), inner, input_precision="ieee")
            else:
                inner = tl.dot(wide.to(x.dtype), tl.trans(a), inner, input_precision="ieee")
        else:
            inner = tl.dot(x, tl.trans(a), inner, input_precision="ieee")
    if NORM:
        inner *= tl.rsqrt(squares / K + eps)[:, None]
    return inner


@triton.jit
def _second_half(
    b_p, slot, first, end, N: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """B of the outputs from `first` on, below `end`: [BN, RANK]."""
    ranks, cols = tl.arange(0, RANK), first + tl.arange(0, BN)
    b_p += slot.to(tl.int64) * N * R
    mask = (cols < end)[:, None] & (ranks < R)[None, :]
    return tl.load(b_p + cols[:, None] * R + ranks[None, :], mask=mask, other=0.0)


@triton.jit
def _outputs(y_p, rows, mine, first, end, y_stride, BN: tl.constexpr):
    """Where the outputs of these rows from `first` on, below `end`, are, and which there are."""
    cols = first + tl.arange(0, BN)
    place = y_p + rows.to(tl.int64)[:, None] * y_stride + cols[None, :]
    return place, mine[:, None] & (cols < end)[None, :]


@triton.jit
def _tile(p):
    """A row of `_tiles`."""
    return tl.load(p), tl.load(p + 1), tl.load(p + 2)


@triton.jit(do_not_specialize=["num_rows"])
def _lora(
    y_p, x_p, w_p, a_p, b_p, slots_p, tiles_p, num_rows, y_stride, x_stride, eps,
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    MOST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    part, first, end = _tile(tiles_p + tl.program_id(0) * 3)
    every = tl.arange(0, MOST)
    if EARLY:  # weights are there before what the kernel before writes
        b = _second_half(b_p, slot, first, end, N, R, RANK, BN)
    join_chain(PDL)
    has = tl.load(slots_p + every, mask=every < num_rows, other=-1) == slot
    place = tl.cumsum(has.to(tl.int32), 0) - 1
    count = tl.sum(has.to(tl.int32), 0)
    if count > 0:
        if not EARLY:
            b = _second_half(b_p, slot, first, end, N, R, RANK, BN)
        for start in range(0, count, BM):
            nth = start + tl.arange(0, BM)
            chosen = has[None, :] & (place[None, :] == nth[:, None])
            rows, mine = tl.sum(tl.where(chosen, every[None, :], 0), 1), nth < count
            target, mask = _outputs(y_p, rows, mine, first, end, y_stride, BN)
            y = tl.load(target, mask=mask, other=0.0).to(tl.float32)
            inner = _inner(
                x_p, w_p, a_p, rows, mine, slot, part, x_stride, eps,
                K, R, PARTS, RANK, BM, BK, NORM,
            )  # fmt: skip
            y = tl.dot(inner.to(b.dtype), tl.trans(b), y, input_precision="ieee")
            tl.store(target, y.to(y_p.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _lora_shrink(
    x_p, w_p, a_p, inner_p, slots_p, num_rows, x_stride, eps,
    K: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, slot = tl.program_id(0), tl.program_id(1)
    rows = tl.program_id(2) * BM + tl.arange(0, BM)
    join_chain(PDL)
    mine = tl.load(slots_p + rows, mask=rows < num_rows, other=-1) == slot
    if tl.max(mine.to(tl.int32), 0) > 0:
        inner = _inner(
            x_p, w_p, a_p, rows, mine, slot, part, x_stride, eps, K, R, PARTS, RANK, BM, BK, NORM
        )
        ranks = tl.arange(0, RANK)
        place = inner_p + (rows.to(tl.int64) * PARTS + part)[:, None] * RANK + ranks[None, :]
        tl.store(place, inner.to(inner_p.dtype.element_ty), mask=mine[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _lora_expand(
    y_p, inner_p, b_p, slots_p, tiles_p, num_rows, y_stride,
    N: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, slot = tl.program_id(0), tl.program_id(1)
    part, first, end = _tile(tiles_p + tile * 3)
    rows = tl.program_id(2) * BM + tl.arange(0, BM)
    join_chain(PDL)
    mine = tl.load(slots_p + rows, mask=rows < num_rows, other=-1) == slot
    if tl.max(mine.to(tl.int32), 0) > 0:
        place = inner_p + (rows.to(tl.int64) * PARTS + part)[:, None] * RANK
        inner = tl.load(place + tl.arange(0, RANK)[None, :], mask=mine[:, None], other=0.0)
        b = _second_half(b_p, slot, first, end, N, R, RANK, BN)
        target, mask = _outputs(y_p, rows, mine, first, end, y_stride, BN)
        y = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        y = tl.dot(inner.to(b.dtype), tl.trans(b), y, input_precision="ieee")
        tl.store(target, y.to(y_p.dtype.element_ty), mask=mask)


def lora(
    y: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor:
    """y [T, N] with b[s] (a[s] x) added in rows of slot s, in its memory where that is possible:
    see fd_lora.kernels."""
    num_rows, width = y.shape
    if not num_rows:
        return y
    y = y if y.stride(1) == 1 else y.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    num_slots, depth, rank, has_norm = a.shape[0], a.shape[2], b.shape[2], norm_weight is not None
    plan = choose(num_rows, width, depth, str(y.dtype).removeprefix("torch."), has_norm=has_norm)
    tiles, num_tiles = _tiles(tuple(ends), plan.columns, y.device)
    padded = max(16, pad2(rank))
    sizes = {"R": rank, "PARTS": len(ends), "RANK": padded, "BM": plan.rows}
    deep = {"K": depth, "BK": plan.depth, "NORM": has_norm}
    how = options(num_warps=plan.warps, num_stages=plan.stages)
    if num_rows < _MANY:
        _lora[(num_tiles, num_slots)](
            y, x, norm_weight, a, b, slots, tiles, num_rows, y.stride(0), x.stride(0), eps,
            N=width, BN=plan.columns, MOST=max(16, pad2(num_rows)), EARLY=plan.is_early,
            **sizes, **deep, **how,
        )  # fmt: skip
        return y
    groups = cdiv(num_rows, plan.rows)
    inner = torch.empty((num_rows, len(ends) * padded), dtype=y.dtype, device=y.device)
    _lora_shrink[(len(ends), num_slots, groups)](
        x, norm_weight, a, inner, slots, num_rows, x.stride(0), eps, **sizes, **deep, **how
    )
    _lora_expand[(num_tiles, num_slots, groups)](
        y, inner, b, slots, tiles, num_rows, y.stride(0), N=width, BN=plan.columns, **sizes, **how
    )
    return y


@dataclass(frozen=True, slots=True)
class Plan:
    """How a program is cut: rows and outputs of its tile, inputs that it reads at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    is_early: bool = True  # B is read while the kernel before still runs


@functools.cache
def choose(num_rows: int, width: int, depth: int, dtype: str, *, has_norm: bool) -> Plan:
    """The plan for these sizes."""
    # What is multiplied in float32 takes twice the shared memory.
    is_wide = dtype == "float32" or (dtype == "float16" and has_norm)
    inner = max(16, pad2(depth))
    if num_rows >= _MANY:
        return Plan(64, 128, min(32 if is_wide else 128, inner), 4, 2 if is_wide else 3)
    columns = 128 if width < 4096 else 256
    return Plan(16, columns, min(64 if is_wide else 512, inner), 4, 2)


@functools.cache
def _tiles(ends: tuple[int, ...], columns: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """[tiles, 3] int32: the part that each tile of outputs belongs to, its first output, and where
    the part ends."""
    found = [
        (part, first, end)
        for part, (start, end) in enumerate(pairwise((0, *ends)))
        for first in range(start, end, columns)
    ]
    return torch.tensor(found, dtype=torch.int32, device=device), len(found)
