"""The operations `lora` and `adapted_product` of fd-lora: what adapters add to a product, each row
with its own or none.

A first launch computes A x: of few rows each by itself (row_sums.py), with the norm before it,
or a program takes one adapter and a share of the inputs, for all of the layer's parts at once, so
that x is read once. The product's kernel adds B A x where the weight is plain and rows are few
(native/gemm.cu), else a second launch: of few rows a program takes one adapter and a tile of
outputs; for many rows see adapted_rows.py.
Sums are added in one order, so a row does not depend on the others. What adapters add to a product
onto the residual of few rows may be left to the norm after it, which computes it while the product
runs.

Rows are not sorted: of few rows a program finds those that have its adapter, of many it takes a
tile and leaves out the others. It ends at once where there are none. So nothing that was captured
depends on who has which.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from . import linear
from .adapted import Adapters, Shape
from .adapted_rows import Sums, even, finish, product, sums_of, tiles_of
from .common import batch_invariant, cdiv, join_chain, options, pad2
from .norm import rms_norm, silu_and_mul
from .row_sums import can_defer, deferred_sums, row_sums, splits_of_rows

FEW = 256  # rows among which a program looks for its own
MOST_SPLITS = 16  # parts of the inputs
_SPLITS = 8  # where a product's kernel reads them, which has many blocks
# Inputs up to which a product onto a residual takes no longer than the library's and a pass.
_DEEPEST = 3072


@triton.jit
def _rows_of(slot, slots_p, num_rows, MOST: tl.constexpr, BM: tl.constexpr):
    """Rows of this program, and which of them have the slot. MOST: rows, at most so many."""
    nth = tl.program_id(2) * BM + tl.arange(0, BM)
    every = tl.arange(0, MOST)
    has = tl.load(slots_p + every, mask=every < num_rows, other=-1) == slot
    place = tl.cumsum(has.to(tl.int32), 0) - 1
    chosen = has[None, :] & (place[None, :] == nth[:, None])
    rows = tl.sum(tl.where(chosen, every[None, :], 0), 1)
    return rows.to(tl.int64), nth < tl.sum(has.to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_rows"])
def _shrink(
    x_p, w_p, a_p, inner_p, squares_p, slots_p, num_rows, x_stride,
    K: tl.constexpr, RANKS: tl.constexpr, PADDED: tl.constexpr, MOST: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, DEPTH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """inner [splits, T, RANKS]: A times x over DEPTH inputs; with NORM times x * w, whose squares,
    without w, are added up in squares [splits, T]."""
    split, slot = tl.program_id(0), tl.program_id(1)
    join_chain(PDL)
    rows, mine = _rows_of(slot, slots_p, num_rows, MOST, BM)
    if tl.max(mine.to(tl.int32), 0) > 0:
        ranks = tl.arange(0, PADDED)
        a_rows = a_p + slot.to(tl.int64) * RANKS * K + ranks[:, None] * K
        x_rows = x_p + rows[:, None] * x_stride
        inner = tl.zeros((BM, PADDED), dtype=tl.float32)
        squares = tl.zeros((BM,), dtype=tl.float32)
        for start in range(0, DEPTH, BK):
            cols = split * DEPTH + start + tl.arange(0, BK)
            inside = cols < K
            x = tl.load(x_rows + cols[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            a_mask = (ranks < RANKS)[:, None] & inside[None, :]
            a = tl.load(a_rows + cols[None, :], mask=a_mask, other=0.0)
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
        place = split.to(tl.int64) * num_rows + rows
        mask = mine[:, None] & (ranks < RANKS)[None, :]
        tl.store(inner_p + place[:, None] * RANKS + ranks[None, :], inner, mask=mask)
        if NORM:
            tl.store(squares_p + place, squares, mask=mine)


@triton.jit(do_not_specialize=["num_rows"])
def _expand(
    y_p, inner_p, squares_p, b_p, slots_p, tiles_p, num_rows, y_stride, eps,
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    SPLITS: tl.constexpr, MOST: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, slot = tl.program_id(0) * 3, tl.program_id(1)
    part, end = tl.load(tiles_p + tile), tl.multiple_of(tl.load(tiles_p + tile + 2), EVEN)
    cols = tl.multiple_of(tl.load(tiles_p + tile + 1), EVEN) + tl.arange(0, BN)
    ranks = tl.arange(0, RANK)
    join_chain(PDL)
    rows, mine = _rows_of(slot, slots_p, num_rows, MOST, BM)
    if tl.max(mine.to(tl.int32), 0) > 0:
        target = y_p + rows[:, None] * y_stride + cols[None, :]
        mask = mine[:, None] & (cols < end)[None, :]
        y = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        b_mask = (cols < end)[:, None] & (ranks < R)[None, :]
        b_rows = b_p + slot.to(tl.int64) * N * R + cols[:, None] * R
        b = tl.load(b_rows + ranks[None, :], mask=b_mask, other=0.0)
        inner = tl.zeros((BM, RANK), dtype=tl.float32)
        squares = tl.zeros((BM,), dtype=tl.float32)
        own = mine[:, None] & (ranks < R)[None, :]
        for split in tl.static_range(SPLITS):
            place = rows + split * num_rows.to(tl.int64)
            sums = inner_p + place[:, None] * RANKS + part * R + ranks[None, :]
            inner += tl.load(sums, mask=own, other=0.0)
            if NORM:
                squares += tl.load(squares_p + place, mask=mine, other=0.0)
        if NORM:
            inner *= tl.rsqrt(squares / K + eps)[:, None]
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
    if _is_many(num_rows):
        x = x if norm_weight is None else rms_norm(x, norm_weight, eps)
        return finish(y, sums_of(x, a, b, tuple(ends), slots), is_gated=False)
    x = x if x.stride(1) == 1 else x.contiguous()
    num_slots, ranks, depth = a.shape
    rank, has_norm = b.shape[2], norm_weight is not None
    plan = choose(width, depth, ranks, str(y.dtype).removeprefix("torch."), MOST_SPLITS)
    tiles, num_tiles = tiles_of(tuple(ends), plan.columns, y.device)
    inner, squares = _sums(x, norm_weight, a, slots, plan)
    splits, groups = inner.shape[0], cdiv(num_rows, plan.rows)
    sizes = _sizes(plan, num_rows, depth, ranks, has_norm=has_norm)
    _expand[(num_tiles, num_slots, groups)](
        y, inner, squares, b, slots, tiles, num_rows, y.stride(0), eps,
        N=width, R=rank, RANK=max(16, pad2(rank)), SPLITS=splits, EVEN=even(ends),
        BN=plan.columns, **sizes, **options(num_warps=plan.warps),
    )  # fmt: skip
    return y


def _sizes(
    plan: Plan, num_rows: int, depth: int, ranks: int, *, has_norm: bool
) -> dict[str, int | bool]:
    most = max(16, pad2(num_rows))
    return {"K": depth, "RANKS": ranks, "MOST": most, "BM": plan.rows, "NORM": has_norm}


def _sums(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    a: torch.Tensor,
    slots: torch.Tensor,
    plan: Plan,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A x of each row's own adapter over parts of the inputs, [parts, T, ranks]; with a norm's
    weight A times x * w, and the squares of x."""
    num_rows, (num_slots, ranks, depth) = x.shape[0], a.shape
    splits, groups = cdiv(depth, plan.depth), cdiv(num_rows, plan.rows)
    inner = torch.empty((splits, num_rows, ranks), dtype=torch.float32, device=x.device)
    squares = None
    if norm_weight is not None:
        squares = torch.empty((splits, num_rows), dtype=torch.float32, device=x.device)
    _shrink[(splits, num_slots, groups)](
        x, norm_weight, a, inner, squares, slots, num_rows, x.stride(0),
        PADDED=max(16, pad2(ranks)), BK=plan.inner, DEPTH=plan.depth,
        **_sizes(plan, num_rows, depth, ranks, has_norm=squares is not None),
        **options(num_warps=plan.warps, num_stages=plan.stages),
    )  # fmt: skip
    return inner, squares


def _is_many(num_rows: int) -> bool:
    return num_rows > FEW or (num_rows > 0 and batch_invariant())


def adapted_product(
    epilogue: str,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor:
    """A plain product of x, or of rms_norm(x), with what adapters add to it: "plain"; "add", on top
    of the residual, which may be overwritten; or "gated", silu(gate) * up."""
    y = _of_few(epilogue, x, norm_weight, eps, weight, bias, residual, a, b, ends, slots)
    if y is not None:
        return y
    if _is_many(x.shape[0]):
        x = x if norm_weight is None else rms_norm(x, norm_weight, eps)
        sums = sums_of(x, a, b, tuple(ends), slots)
        return _of_many(epilogue, x, weight, bias, residual, sums)
    if residual is not None:
        y = linear.linear_add(x, weight, bias, residual)
    elif norm_weight is not None:
        y = linear.norm_linear(x, norm_weight, eps, weight, bias)
    else:
        y = linear.linear(x, weight, bias)
    y = lora(y, x, norm_weight, eps, a, b, ends, slots)
    return silu_and_mul(y) if epilogue == "gated" else y


def deferring_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
) -> torch.Tensor | None:
    """residual + x times weight, for a norm that adds what adapters add; None where they had better
    add it at once."""
    _, width, rank = b.shape
    if a.shape[1] != rank or not can_defer(x.shape[0], rank, width, x.shape[1]):
        return None  # a product of several parts, or one that row_sums.py does not finish
    shape = Shape(1, rank, (width,), 1)
    plan = linear.plan_with_adapters("add", x, weight, shape, has_norm=False)
    if plan is None:
        return None
    plan = replace(plan, is_deferring=True)
    residual = residual if residual.is_contiguous() else residual.contiguous()
    return linear.compute(plan, "add", x, None, 0.0, weight, bias, residual)


def deferred_product(
    epilogue: str,
    x: torch.Tensor,
    deferred: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """adapted_product of rms_norm(total), and total: x with what deferring_add left out."""
    num_rows, (num_slots, ranks, depth), rank = x.shape[0], a.shape, b.shape[2]
    shape = Shape(num_slots, rank, tuple(ends), splits_of_rows(num_rows, ranks, rank, depth))
    plan = None
    if shape.splits == 1:
        plan = linear.plan_with_adapters(epilogue, x, weight, shape, has_norm=True)
    if plan is None:
        normed, total = deferred_norm(x, deferred, norm_weight, eps, slots)
        more = (a, b, ends, slots)
        return adapted_product(epilogue, normed, None, 0.0, weight, bias, None, *more), total
    normed, inner, total = deferred_sums(x, deferred, norm_weight, eps, a, slots)
    adapters = Adapters(b, shape.ends, slots, inner)
    return linear.compute(plan, epilogue, normed, None, 0.0, weight, bias, None, adapters), total


def deferred_norm(
    x: torch.Tensor,
    deferred: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norm_weight: torch.Tensor,
    eps: float,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm(total), and total as of deferred_product."""
    normed, _, total = deferred_sums(x, deferred, norm_weight, eps, None, slots)
    return normed, total


def _of_few(
    epilogue: str,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor | None:
    """adapted_product where native/gemm.cu computes it: A x, then all else in one launch."""
    num_rows, (num_slots, ranks, depth), rank = x.shape[0], a.shape, b.shape[2]
    has_norm = norm_weight is not None
    splits = splits_of_rows(num_rows, ranks, rank, depth)
    by_tiles = choose(0, depth, ranks, "bfloat16", _SPLITS)
    shape = Shape(num_slots, rank, tuple(ends), splits or cdiv(depth, by_tiles.depth))
    plan = linear.plan_with_adapters(epilogue, x, weight, shape, has_norm=has_norm)
    if plan is None:
        return None
    if splits:
        x, inner = row_sums(x, norm_weight, eps, a, rank, slots, splits)
    else:
        x = x if norm_weight is None else rms_norm(x, norm_weight, eps)
        inner, _ = _sums(x, None, a, slots, by_tiles)
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    adapters = Adapters(b, shape.ends, slots, inner)
    return linear.compute(plan, epilogue, x, None, 0.0, weight, bias, residual, adapters)


def _of_many(
    epilogue: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    sums: Sums,
) -> torch.Tensor:
    """adapted_product of many rows, normed before."""
    is_gated = epilogue == "gated"
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    deepest = linear.SHALLOW if residual is None else _DEEPEST
    if bias is None and linear.is_fused(x, weight, deepest):
        return product(x, weight, residual, sums, is_gated=is_gated)
    if residual is not None:
        return finish(linear.linear_add(x, weight, bias, residual), sums, is_gated=False)
    return finish(linear.linear(x, weight, bias), sums, is_gated=is_gated)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the work is cut: rows and outputs of a tile, inputs of a program, inputs that it reads at
    a time."""

    rows: int
    columns: int
    depth: int
    inner: int
    warps: int
    stages: int


@functools.cache
def choose(width: int, depth: int, ranks: int, dtype: str, most_splits: int) -> Plan:
    """All loads of a program are under way at once."""
    # Numbers of A in shared memory; what is multiplied in float32 takes twice the room.
    held = 16384 if dtype == "bfloat16" else 8192
    inner = max(16, min(256, pad2(depth), held // max(16, pad2(ranks))))
    share = cdiv(cdiv(depth, most_splits), inner) * inner
    return Plan(16, 64 if width < 4096 else 128, share, inner, 4, 2)
