"""What adapters add to products, by tiles of rows.

Rows of a tile follow each other, in prompts mostly in one, so it goes through few adapters: from
the first of its rows' to the last. Of few rows, each may have another one, and a program takes one
adapter. One launch computes A x. B times that is added while the product is in registers, or where
a kernel reads what the library multiplied to apply the activation; else by a pass of its own. Sums
are added in one order, so a row does not depend on the others.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl

from . import many_rows
from .common import batch_invariant, cdiv, join_chain, options, pad2
from .norm import silu_and_mul
from .routing import order_by_expert

_FEW = 256  # rows up to which a program takes one adapter
_UNDERFILLED = 4096  # rows up to which tiles leave much of the GPU idle: programs get less to do
_SPLITS, _SPLITS_FEW = 4, 12  # most parts of the inputs
_SHARE, _SHARE_UNDERFILLED = 1024, 256  # the least inputs of one
# Programs that share out a tile's adapters: one tile has a step's decoded tokens, of all.
_TURNS, _TURNS_UNDERFILLED = 4, 8
_WIDE = 4096  # outputs from which a program of few rows computes 128 of them, not 64
_GATED, _PLAIN = many_rows.Shape(64, 4, 3), many_rows.Shape(128, 8, 3)
_ADD = many_rows.Shape(256, 8, 3)
_NO_EXPERTS = {"EXPERTS": 0, "TOP_K": 1}
# Of experts: rows of one from which a program computes so many at a time, else 16; outputs at most,
# and bytes of B that it multiplies at once.
_SOME_EACH, _SOME, _COLUMNS, _HELD = 32, 64, 128, 1 << 15


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
def _rows_of(
    block, slots_p, order_p, experts_p, num_rows,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rows of a block, the slots of their adapters, -1 without one, and the block's expert. With
    EXPERTS rows are pairs of one of TOP_K choices and its token, in that order of theirs."""
    rows, expert = block * BM + tl.arange(0, BM), 0
    if EXPERTS > 0:
        rows, expert = tl.load(order_p + rows), tl.load(experts_p + block).to(tl.int64)
    inside = (rows < num_rows) & (expert >= 0)
    tokens = rows // TOP_K if EXPERTS > 0 else rows
    return rows.to(tl.int64), tl.load(slots_p + tokens, mask=inside, other=-1), expert


@triton.jit(do_not_specialize=["num_rows"])
def _sums(
    x_p, a_p, inner_p, slots_p, order_p, experts_p, num_rows, x_stride,
    K: tl.constexpr, RANKS: tl.constexpr, PADDED: tl.constexpr, SHARE: tl.constexpr,
    TURNS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, DIVISOR: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """inner [splits, T, RANKS]: A times x over SHARE inputs, of every so many adapters one. A row
    has row / DIVISOR of x."""
    split, block = tl.program_id(2), tl.program_id(1)
    join_chain(PDL)
    rows, slots, expert = _rows_of(block, slots_p, order_p, experts_p, num_rows, EXPERTS, TOP_K, BM)
    x_rows = rows // DIVISOR if DIVISOR > 1 else rows
    EACH: tl.constexpr = RANKS * K * max(1, EXPERTS)  # numbers of A of an adapter
    last = tl.max(slots, 0)
    if last >= 0:
        first = tl.min(tl.where(slots < 0, last, slots), 0) + tl.program_id(0)
        ranks = tl.arange(0, PADDED)
        a_rows = a_p + first.to(tl.int64) * EACH + expert * (RANKS * K) + ranks[:, None] * K
        inner = tl.zeros((BM, PADDED), dtype=tl.float32)
        for slot in range(first, last + 1, TURNS):
            mine = slots == slot
            if tl.max(mine.to(tl.int32), 0) > 0:
                for start in range(0, SHARE, BK):
                    inputs = split * SHARE + start + tl.arange(0, BK)
                    inside = (inputs < K)[None, :]
                    x = tl.load(
                        x_p + x_rows[:, None] * x_stride + inputs[None, :],
                        mask=mine[:, None] & inside, other=0.0,
                    )  # fmt: skip
                    a = tl.load(
                        a_rows + inputs[None, :], mask=(ranks < RANKS)[:, None] & inside, other=0.0
                    )
                    inner = tl.dot(x, tl.trans(a), inner, input_precision="ieee")
            a_rows += TURNS * EACH
        own = (slots >= first) & ((slots - first) % TURNS == 0)
        place = (split.to(tl.int64) * num_rows + rows)[:, None] * RANKS + ranks[None, :]
        tl.store(inner_p + place, inner, mask=own[:, None] & (ranks < RANKS)[None, :])


@triton.jit
def _asked(
    inner_p, b_p, slots, rows, num_rows, part, columns, inside,
    EACH: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    SPLITS: tl.constexpr, PAIR: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What `_added` multiplies, asked for before it is needed: A x of these rows, B of the first of
    their adapters, its slot and the last one's; -1 where no row has any."""
    last = tl.max(slots, 0)
    first = tl.min(tl.where(slots < 0, last, slots), 0)
    both = tl.arange(0, RANK * 2 if PAIR else RANK)
    half, ranks = both // RANK, both % RANK
    own = (slots >= 0)[:, None] & (ranks < R)[None, :]
    sums = inner_p + rows[:, None] * RANKS + ((part + half) * R + ranks)[None, :]
    inner = tl.load(sums, mask=own, other=0.0)
    for split in tl.static_range(1, SPLITS):
        inner += tl.load(sums + num_rows.to(tl.int64) * RANKS * split, mask=own, other=0.0)
    b = _b_of(b_p, first, half, ranks, columns, inside & (last >= 0), EACH, R, PAIR, WIDTH)
    return inner.to(b.dtype), b, first, last


@triton.jit
def _b_of(
    b_p, slot, half, ranks, columns, inside,
    EACH: tl.constexpr, R: tl.constexpr, PAIR: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """EACH: numbers of B of an adapter."""
    mask = inside[None, :] & (ranks < R)[:, None]
    if PAIR:
        mask &= half[:, None] == (tl.arange(0, WIDTH) * 2 // WIDTH)[None, :]
    start = b_p + tl.full((), EACH, tl.int64) * slot
    return tl.load(start + columns[None, :] * R + ranks[:, None], mask=mask, other=0.0)


@triton.jit
def _added(
    total, inner, b, first, last, b_p, slots, columns, inside,
    EACH: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, PAIR: tl.constexpr,
    SKIPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """total [rows, WIDTH] with what adapters add to these columns of one part; with PAIR the second
    half of the columns is of the next part. SKIPS: many adapters are no row's."""
    if last >= 0:
        both = tl.arange(0, RANK * 2 if PAIR else RANK)
        half, ranks = both // RANK, both % RANK
        own = tl.where((slots == first)[:, None], inner, 0.0).to(b.dtype)
        total = tl.dot(own, b, total, input_precision="ieee")
        for slot in tl.range(first + 1, last + 1, num_stages=1):
            is_here = tl.max((slots == slot).to(tl.int32), 0) > 0 if SKIPS else True
            if is_here:
                more = _b_of(b_p, slot, half, ranks, columns, inside, EACH, R, PAIR, WIDTH)
                own = tl.where((slots == slot)[:, None], inner, 0.0).to(b.dtype)
                total = tl.dot(own, more, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _finish(
    y_p, out_p, inner_p, b_p, slots_p, order_p, experts_p, tiles_p, num_rows, y_stride,
    N: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    SPLITS: tl.constexpr, GATED: tl.constexpr, TURNS: tl.constexpr, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y with what adapters add, of every so many one, in its place; GATED: silu(gate) * up of it,
    to out [T, N / 2]. Parts begin and end at multiples of EVEN; the compiler reads as many numbers
    at once."""
    tile = tl.program_id(1) * 3
    part, end = tl.load(tiles_p + tile), tl.multiple_of(tl.load(tiles_p + tile + 2), EVEN)
    columns = tl.multiple_of(tl.load(tiles_p + tile + 1), EVEN) + tl.arange(0, BN)
    block = tl.program_id(0)
    join_chain(PDL)
    rows, slots, expert = _rows_of(block, slots_p, order_p, experts_p, num_rows, EXPERTS, TOP_K, BM)
    b_p += expert * (N * R)
    EACH: tl.constexpr = N * R * max(1, EXPERTS)
    if TURNS > 1:
        slots = tl.where(slots % TURNS == tl.program_id(2), slots, -1)
    if GATED or tl.max(slots, 0) >= 0:
        inside = columns < end
        mask = (rows < num_rows)[:, None] & inside[None, :]
        y_tile = y_p + rows[:, None] * y_stride + columns[None, :]
        y = tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(y_tile + N // 2, mask=mask, other=0.0).to(tl.float32)
        inner, b, first, last = _asked(
            inner_p, b_p, slots, rows, num_rows, part, columns, inside,
            EACH, R, RANKS, RANK, SPLITS, False, BN,
        )  # fmt: skip
        y = _added(
            y, inner, b, first, last, b_p, slots, columns, inside, EACH, R, RANK, False,
            EXPERTS > 0, BN,
        )  # fmt: skip
        if GATED:
            columns_up = columns + N // 2
            inner, b, first, last = _asked(
                inner_p, b_p, slots, rows, num_rows, part + 1, columns_up, inside,
                EACH, R, RANKS, RANK, SPLITS, False, BN,
            )  # fmt: skip
            up = _added(
                up, inner, b, first, last, b_p, slots, columns_up, inside, EACH, R, RANK, False,
                False, BN,
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
    SPLITS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BM rows times BN outputs, or pairs of gate and up, as many_rows computes them; ADD: onto what
    is in y."""
    WIDTH: tl.constexpr = BN * 2 if GATED else BN
    block, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles * 3
    part, end = tl.load(tiles_p + tile), tl.multiple_of(tl.load(tiles_p + tile + 2), EVEN)
    start = tl.multiple_of(tl.load(tiles_p + tile + 1), EVEN)
    rows = (block * BM + tl.arange(0, BM)).to(tl.int64)
    join_chain(PDL)
    slots = tl.load(slots_p + rows, mask=rows < num_rows, other=-1)
    wide = tl.arange(0, WIDTH)
    columns, inside = start + wide % BN + wide // BN * (N // 2), start + wide % BN < end
    inner, b, first, last = _asked(
        inner_p, b_p, slots, rows, num_rows, part, columns, inside,
        N * R, R, RANKS, RANK, SPLITS, GATED, WIDTH,
    )  # fmt: skip
    stored = start + tl.arange(0, BN)
    y = y_p + rows[:, None] * (N // 2 if GATED else N) + stored[None, :]
    mask = (rows < num_rows)[:, None] & (stored < end)[None, :]
    if ADD:
        residual = tl.load(y, mask=mask, other=0.0)
    total = tl.zeros((BM, WIDTH), tl.float32)
    for k in tl.range(0, depth, BK, num_stages=STAGES):
        x = x_tiles.load([block * BM, k])
        if GATED:
            w = w_tiles.load([0, start, k]).reshape(WIDTH, BK)
        else:
            w = w_tiles.load([start, k])
        total = tl.dot(x, w.T, total)
    total = _added(
        total, inner, b, first, last, b_p, slots, columns, inside, N * R, R, RANK, GATED, False,
        WIDTH,
    )  # fmt: skip
    if GATED:
        gate, up = total.reshape(BM, 2, BN).permute(0, 2, 1).split()
        total = gate / (1.0 + tl.exp(-gate)) * up
    if ADD:
        total += residual.to(tl.float32)
    tl.store(y, total.to(y_p.dtype.element_ty), mask=mask)


def sums_of(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: tuple[int, ...], slots: torch.Tensor
) -> Sums:
    """A x of each row's own adapter, for a [slots, parts * rank, K]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, (_, ranks, depth) = x.shape[0], a.shape
    padded, is_few = max(16, pad2(ranks)), _is_few(num_rows)
    splits, share, columns = splits_of(x, ranks)
    rows = 64 if ranks <= 64 and not is_few else 16
    inner = torch.empty((splits, num_rows, ranks), dtype=torch.float32, device=x.device)
    turns = a.shape[0]
    if not is_few:
        turns = min(turns, _TURNS_UNDERFILLED if num_rows <= _UNDERFILLED else _TURNS)
    _sums[(turns, cdiv(num_rows, rows), splits)](
        x, a, inner, slots, None, None, num_rows, x.stride(0), K=depth, RANKS=ranks, PADDED=padded,
        SHARE=share, TURNS=turns, **_NO_EXPERTS, DIVISOR=1, BM=rows, BK=columns,
        **options(num_warps=4, num_stages=2 if is_few else 4 if padded <= 128 else 3),
    )  # fmt: skip
    return Sums(inner, b, ends, slots)


def splits_of(x: torch.Tensor, ranks: int) -> tuple[int, int, int]:
    """Parts of the inputs that sums_of makes, inputs of one, and those that are read at a time."""
    num_rows, depth = x.shape
    # Numbers of A in shared memory; what is multiplied in float32 takes twice the room.
    held = 16384 if x.dtype == torch.bfloat16 else 8192
    is_few = _is_few(num_rows)
    fitting = min(256 if is_few else 64, held // max(16, pad2(ranks)))
    columns, most, least = max(16, min(fitting, pad2(depth))), _SPLITS, _SHARE
    if is_few:
        most, least = _SPLITS_FEW, columns
    elif num_rows <= _UNDERFILLED and not batch_invariant():
        least = _SHARE_UNDERFILLED
    splits = max(1, min(most, depth // least))
    share = cdiv(cdiv(depth, splits), columns) * columns
    return cdiv(depth, share), share, columns


def _is_few(num_rows: int) -> bool:
    return num_rows <= _FEW and not batch_invariant()


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    sums: Sums,
    *,
    is_gated: bool,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, and what adapters add; is_gated: silu(gate) * up of
    it; with a residual [T, N] in its memory. For what many_rows.dense_gated can compute."""
    num_rows, (width, depth) = x.shape[0], weight.shape
    shape, y = _ADD, residual
    if y is None:
        shape = _GATED if is_gated else _PLAIN
        y = torch.empty((num_rows, width >> is_gated), dtype=x.dtype, device=x.device)
    tiles, num_tiles = _tiles_of(_ends(sums, is_gated=is_gated), shape.columns, x.device)
    x_tiles = many_rows.row_tiles(x, many_rows.ROWS)
    of_weight = many_rows.gate_tiles if is_gated else many_rows.row_tiles
    _product[(cdiv(num_rows, many_rows.ROWS) * num_tiles,)](
        x_tiles, of_weight(weight, shape.columns), y, sums.inner, sums.b, sums.slots, tiles,
        num_rows, depth, num_tiles, **_sizes(sums), GATED=is_gated, ADD=residual is not None,
        BM=many_rows.ROWS, BN=shape.columns, BK=many_rows.DEPTH, STAGES=shape.stages,
        **options(num_warps=shape.warps),
    )  # fmt: skip
    return y


def finish(y: torch.Tensor, sums: Sums, *, is_gated: bool) -> torch.Tensor:
    """y [T, N], a product without adapters, with what they add, in its memory; is_gated: silu(gate)
    * up of it."""
    num_rows, width = y.shape
    num_slots, _, rank = sums.b.shape
    is_few = _is_few(num_rows)
    if is_few and is_gated:  # a program that has all of a row's adapters goes through many
        return silu_and_mul(finish(y, sums, is_gated=False))
    out = y
    if is_gated:
        out = torch.empty((num_rows, width // 2), dtype=y.dtype, device=y.device)
    rows = 16 if is_few or rank > 64 else 32 if is_gated else 64
    columns, turns = 128 if is_few and width >= _WIDE else 64, num_slots if is_few else 1
    tiles, num_tiles = _tiles_of(_ends(sums, is_gated=is_gated), columns, y.device)
    _finish[(cdiv(num_rows, rows), num_tiles, turns)](
        y, out, sums.inner, sums.b, sums.slots, None, None, tiles, num_rows, y.stride(0),
        **_sizes(sums), GATED=is_gated, TURNS=turns, **_NO_EXPERTS, BM=rows, BN=columns,
        **options(num_warps=4),
    )  # fmt: skip
    return out


def add_to_experts(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: tuple[int, ...],
    slots: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
) -> None:
    """What adapters add to experts' products, into y [T * k, N]: a [slots * experts, parts * rank,
    K], b [slots * experts, N, rank], row pair of y of row pair / (T * k / rows of x) of x."""
    num_pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    is_some = batch_invariant() or num_pairs >= _SOME_EACH * num_experts
    rows = _SOME if is_some else 16
    order = order_by_expert(topk_ids, num_experts, rows)
    (_, ranks, depth), rank = a.shape, b.shape[2]
    padded = max(16, pad2(ranks))
    # As many numbers of A as fit in shared memory beside those of x, twice.
    inputs = max(16, min(256, pad2(depth), 4096 // padded * (32 // x.element_size()) // 4))
    inner = torch.empty((1, num_pairs, ranks), dtype=torch.float32, device=x.device)
    blocks, sizes = len(order.experts), {"EXPERTS": num_experts, "TOP_K": top_k, "BM": rows}
    _sums[(1, blocks, 1)](
        x, a, inner, slots, order.slots, order.experts, num_pairs, x.stride(0), K=depth,
        RANKS=ranks, PADDED=padded, SHARE=depth, TURNS=1, DIVISOR=num_pairs // x.shape[0],
        BK=inputs, **sizes, **options(num_warps=4, num_stages=2),
    )  # fmt: skip
    sums = Sums(inner, b, ends, slots)
    fitting = min(_COLUMNS, _HELD // (max(16, pad2(rank)) * x.element_size()))
    columns = max(16, min(fitting, pad2(max(ends))))
    tiles, num_tiles = _tiles_of(ends, columns, y.device)
    _finish[(blocks, num_tiles)](
        y, y, inner, b, slots, order.slots, order.experts, tiles, num_pairs, y.stride(0),
        **_sizes(sums), GATED=False, TURNS=1, BN=columns, **sizes, **options(num_warps=4),
    )  # fmt: skip


def _ends(sums: Sums, *, is_gated: bool) -> tuple[int, ...]:
    """Of parts; of pairs, the gates'."""
    return sums.ends[:1] if is_gated else sums.ends


def _sizes(sums: Sums) -> dict[str, int]:
    splits, _, ranks = sums.inner.shape
    _, width, rank = sums.b.shape
    return {
        "N": width,
        "R": rank,
        "RANKS": ranks,
        "RANK": max(16, pad2(rank)),
        "SPLITS": splits,
        "EVEN": math.gcd(16, *sums.ends),  # what all parts begin and end at multiples of
    }


@functools.cache
def _tiles_of(
    ends: tuple[int, ...], columns: int, device: torch.device
) -> tuple[torch.Tensor, int]:
    """[tiles, 3] int32: the part that each tile of outputs belongs to, its first output, and where
    the part ends."""
    found = [
        (part, first, end)
        for part, (start, end) in enumerate(pairwise((0, *ends)))
        for first in range(start, end, columns)
    ]
    return torch.tensor(found, dtype=torch.int32, device=device), len(found)
