"""A x of few rows, before the product's launch: by row, after the norm where there is one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .common import cdiv, options, pad2

MOST_ROWS, MOST_READ = 128, 1 << 16  # each row reads its own A, of so many numbers
_READ, _READ_ONCE = 1 << 14, 1 << 15  # numbers that a program reads at once, and at most


@triton.jit
def _sums_of_rows(
    x_p, w_p, a_p, y_p, inner_p, slots_p, num_rows, x_stride, eps,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    R: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A row, a part of the product, and SHARE of the inputs, all with NORM. A is read before the
    kernel before has ended, by a slot that may be an old one; then it is read again."""
    if PDL:
        gdc_launch_dependents()
    row, part, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    nth, ranks = tl.arange(0, BLOCK), tl.arange(0, RANK)
    cols = split * SHARE + nth
    inside = (nth < SHARE) & (cols < WIDTH)
    if NORM:
        weight = tl.load(w_p + cols, mask=inside, other=0.0).to(tl.float32)
    mask = (ranks < R)[:, None] & inside[None, :]
    a_rows = a_p + (part * R + ranks)[:, None] * WIDTH + cols[None, :]
    early = tl.load(slots_p + row, cache_modifier=".cg")
    is_slot = (early >= 0) & (early < SLOTS)
    a = tl.load(a_rows + early.to(tl.int64) * RANKS * WIDTH, mask=mask & is_slot, other=0.0)
    if PDL:
        gdc_wait()
    slot = tl.load(slots_p + row, cache_modifier=".cg")
    x = tl.load(x_p + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight
        y = x.to(y_p.dtype.element_ty)
        if part == 0:
            tl.store(y_p + row * WIDTH + cols, y, mask=inside)
        x = y.to(tl.float32)
    if slot >= 0:
        if slot != early:
            a = tl.load(a_rows + slot.to(tl.int64) * RANKS * WIDTH, mask=mask, other=0.0)
        inner = tl.sum(a.to(tl.float32) * x[None, :], 1)
        place = (split * num_rows + row) * RANKS + part * R + ranks
        tl.store(inner_p + place, inner, mask=ranks < R)


def splits_of_rows(num_rows: int, ranks: int, rank: int, width: int, *, has_norm: bool) -> int:
    """Parts of the inputs that sums_of_rows makes; 0 where a tensor core's launch is faster."""
    if num_rows > MOST_ROWS or ranks * width > MOST_READ:
        return 0
    if has_norm:
        return int(rank * width <= _READ_ONCE)
    return cdiv(rank * width, _READ)


def sums_of_rows(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    a: torch.Tensor,
    rank: int,
    slots: torch.Tensor,
    splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = x, or rms_norm(x), and a[s] y in parts, [splits, T, parts of the product * rank] float32,
    for a [slots, parts * rank, K]; rows without an adapter get no sums."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, (num_slots, ranks, width) = x.shape[0], a.shape
    has_norm = norm_weight is not None
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device) if has_norm else x
    inner = torch.empty((splits, num_rows, ranks), dtype=torch.float32, device=x.device)
    share = cdiv(cdiv(width, splits), 16) * 16
    _sums_of_rows[(num_rows, ranks // rank, splits)](
        x, norm_weight, a, y, inner, slots, num_rows, x.stride(0), eps, WIDTH=width, SHARE=share,
        BLOCK=pad2(share), SLOTS=num_slots, R=rank, RANKS=ranks, RANK=pad2(rank), NORM=has_norm,
        **options(num_warps=8),
    )  # fmt: skip
    return y, inner
