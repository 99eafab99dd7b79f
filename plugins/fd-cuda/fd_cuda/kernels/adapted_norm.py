"""The norm before a product, and what adapters make of its result, in one launch: A x of few
rows, so that the product's launch finds it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .common import options, pad2

MOST_READ = 1 << 15  # numbers of A that a program reads at once: one part of one adapter
MOST_ROWS = 128  # each reads its own


@triton.jit
def _norm_and_sums(
    x_p, w_p, a_p, y_p, inner_p, slots_p, x_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr,
    RANKS: tl.constexpr, RANK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row and a part of the product. A is read before the kernel before has ended, by a slot that
    may be an old one; then it is read again."""
    if PDL:
        gdc_launch_dependents()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols, ranks = tl.arange(0, BLOCK), tl.arange(0, RANK)
    inside = cols < WIDTH
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
    y = (x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight).to(y_p.dtype.element_ty)
    if part == 0:
        tl.store(y_p + row * WIDTH + cols, y, mask=inside)
    if slot >= 0:
        if slot != early:
            a = tl.load(a_rows + slot.to(tl.int64) * RANKS * WIDTH, mask=mask, other=0.0)
        inner = tl.sum(a.to(tl.float32) * y.to(tl.float32)[None, :], 1)
        tl.store(inner_p + row * RANKS + part * R + ranks, inner, mask=ranks < R)


def norm_and_sums(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    a: torch.Tensor,
    parts: int,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm(x), and a[s] times it, [1, T, parts * rank] float32, for a [slots, parts * rank, K];
    rows without an adapter get no sums."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, (num_slots, ranks, width) = x.shape[0], a.shape
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    inner = torch.empty((1, num_rows, ranks), dtype=torch.float32, device=x.device)
    rank = ranks // parts
    _norm_and_sums[(num_rows, parts)](
        x, weight, a, y, inner, slots, x.stride(0), eps, WIDTH=width, BLOCK=pad2(width),
        SLOTS=num_slots, R=rank, RANKS=ranks, RANK=pad2(rank), **options(num_warps=8),
    )  # fmt: skip
    return y, inner
