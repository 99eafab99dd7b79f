"""Token histories: appending what a step kept, and what followed the end of a history before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import join_chain, options, pad2

BLOCK = 2048
MOST = 32  # drafts of one kernel, so that fewer ones need no other


@triton.jit(do_not_specialize=["num_slots", "length"])
def _append(
    slots_p, results_p, computed_p, history_p, num_slots, length,
    WIDTH: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_p + row)
    nth = tl.arange(0, PAD)
    tokens = tl.load(results_p + row * WIDTH + nth, mask=nth < WIDTH, other=-1)
    count = tl.min(tl.where(tokens < 0, nth, PAD), 0).to(tl.int64)
    count = tl.minimum(count, WIDTH)
    where = tl.load(computed_p + slot) + 1 - count + nth
    keeps = (nth < count) & (slot < num_slots - 1) & (where < length)
    tl.store(history_p + slot * length + where, tokens.to(tl.int32), mask=keeps)


@triton.jit(do_not_specialize=["length", "n"])
def _match(
    history_p, slots_p, known_p, out_p, length, n,
    MIN: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    base = history_p + tl.load(slots_p + row) * length
    known = tl.load(known_p + row)
    last = known - 1
    best = tl.zeros((), tl.int64)
    for first in range(0, last, BLOCK):
        place = first + tl.arange(0, BLOCK)
        alive = place < last
        size = tl.zeros((BLOCK,), tl.int64)
        for back in tl.static_range(MAX):
            end = tl.load(base + last - back, mask=last >= back, other=-1)
            there = tl.load(base + place - back, mask=alive & (place >= back), other=-2)
            alive = alive & (there == end)
            size += alive.to(tl.int64)
        score = tl.where(size >= MIN, size * (length + 1) + place + 1, 0)
        best = tl.maximum(best, tl.max(score, 0))
    begin = best % (length + 1)
    period = tl.maximum(known - begin, 1)
    nth = tl.arange(0, PAD)
    tokens = tl.load(base + begin + nth % period, mask=(nth < n) & (best > 0), other=-1)
    tl.store(out_p + row * n + nth, tokens.to(tl.int64), mask=nth < n)


def append_history(
    slots: torch.Tensor, results: torch.Tensor, num_computed: torch.Tensor, history: torch.Tensor
) -> None:
    """Each row's kept tokens go after its history."""
    num_rows, width = results.shape
    if num_rows:
        _append[(num_rows,)](
            slots, results, num_computed, history, *history.shape,
            WIDTH=width, PAD=pad2(width), **options(num_warps=1),
        )  # fmt: skip


def match_ngrams(
    history: torch.Tensor,
    slots: torch.Tensor,
    num_known: torch.Tensor,
    min_size: int,
    max_size: int,
    n: int,
) -> torch.Tensor:
    """The continuation of the longest end of each history that stood before; one program per
    row."""
    num_rows = slots.shape[0]
    out = torch.empty((num_rows, n), dtype=torch.int64, device=history.device)
    if num_rows and n:
        _match[(num_rows,)](
            history, slots, num_known, out, history.shape[1], n,
            MIN=min_size, MAX=max_size, BLOCK=min(BLOCK, pad2(history.shape[1])), PAD=max(MOST,
                pad2(n)),
            **options(num_warps=8),
        )  # fmt: skip
    return out
