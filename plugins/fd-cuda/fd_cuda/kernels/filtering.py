"""min_p, top_k and top_p without sorting. On Hopper native/filter.cu does it; here is the same in
Triton: one program per row finds the smallest logit that is kept.

What is kept are the largest logits down to some value, so only that value is sought. Passes over
the row narrow the range it lies in by three pivots at a time, counting what lies above each; as
soon as few logits are left in the range they are moved aside and the value is found among them in
registers. Counts and sums are taken in a fixed order, so the result is the same every time and in
any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import native
from .common import join_chain, options
from .sampling import ordered, unordered

_FEW = 4096  # logits that are handled in registers
_BLOCK = 4096
# native/filter.cu: a row in the shared memory of a cluster of blocks.
_CLUSTER, _THREADS, _MOST_ITEMS = 8, 512, 51


@triton.jit
def _above(
    row_p, width, low, high, first, second, third, peak, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """What lies in [low, high) and at or above each pivot: three amounts, and their numbers from
    low on.

    The amount is a count, or with BY_MASS the sum of exp(x - peak)."""
    a1 = tl.zeros((BLOCK,), tl.float32)
    a2 = tl.zeros((BLOCK,), tl.float32)
    a3 = tl.zeros((BLOCK,), tl.float32)
    n0 = tl.zeros((BLOCK,), tl.int32)
    n1 = tl.zeros((BLOCK,), tl.int32)
    n2 = tl.zeros((BLOCK,), tl.int32)
    n3 = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        x = tl.load(row_p + columns, mask=columns < width, other=float("-inf"))
        inside = (x >= low) & (x < high) & (columns < width)
        is1, is2, is3 = inside & (x >= first), inside & (x >= second), inside & (x >= third)
        n0 += inside.to(tl.int32)
        n1 += is1.to(tl.int32)
        n2 += is2.to(tl.int32)
        n3 += is3.to(tl.int32)
        if BY_MASS:
            weight = tl.exp(x - peak)
            a1 += tl.where(is1, weight, 0.0)
            a2 += tl.where(is2, weight, 0.0)
            a3 += tl.where(is3, weight, 0.0)
    c0, c1, c2, c3 = tl.sum(n0, 0), tl.sum(n1, 0), tl.sum(n2, 0), tl.sum(n3, 0)
    if BY_MASS:
        m1, m2, m3 = tl.sum(a1, 0), tl.sum(a2, 0), tl.sum(a3, 0)
    else:
        m1, m2, m3 = c1.to(tl.float32), c2.to(tl.float32), c3.to(tl.float32)
    return m1, m2, m3, c0, c1, c2, c3


@triton.jit
def _smallest_kept(
    row_p, aside_p, width, low, peak, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """The largest value v >= low of the row such that the amount at or above v is at least
    `wanted`; low if there is none. Values are at most peak."""
    # Differences of keys need more than 32 bits.
    low_key = ordered(low).to(tl.int64)
    high_key = ordered(peak).to(tl.int64) + 1
    beyond = tl.zeros((), tl.float32)  # the amount at or above the range
    left = tl.zeros((), tl.int32) + width  # logits in the range
    while (left > FEW) & (high_key - low_key > 1):
        lowest, highest = unordered(low_key), unordered(high_key - 1)
        step = (highest - lowest) * 0.25
        # The middle of the keys always divides the range; the others go by value, where logits are
        # dense.
        half = low_key + ((high_key - low_key) >> 1)
        one, two = ordered(highest - 2.0 * step).to(tl.int64), ordered(highest - step).to(tl.int64)
        one = tl.minimum(tl.maximum(one, low_key + 1), high_key - 1)
        two = tl.minimum(tl.maximum(two, low_key + 1), high_key - 1)
        first = tl.minimum(half, tl.minimum(one, two))
        third = tl.maximum(half, tl.maximum(one, two))
        second = tl.maximum(tl.minimum(half, one), tl.minimum(tl.maximum(half, one), two))
        m1, m2, m3, c0, c1, c2, c3 = _above(
            row_p, width, lowest, unordered(high_key), unordered(first), unordered(second),
            unordered(third), peak, BY_MASS, BLOCK,
        )  # fmt: skip
        if beyond + m3 >= wanted:
            low_key, left = third, c3
        elif beyond + m2 >= wanted:
            low_key, high_key, left, beyond = second, third, c2 - c3, beyond + m3
        elif beyond + m1 >= wanted:
            low_key, high_key, left, beyond = first, second, c1 - c2, beyond + m2
        else:
            high_key, left, beyond = first, c0 - c1, beyond + m1
    if high_key - low_key > 1:
        # Move what is left aside and halve the range in registers.
        lowest, end = unordered(low_key), unordered(high_key)
        tl.debug_barrier()
        moved = tl.zeros((), tl.int32)
        for begin in range(0, width, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            x = tl.load(row_p + columns, mask=columns < width, other=float("-inf"))
            inside = (x >= lowest) & (x < end) & (columns < width)
            taken = inside.to(tl.int32)
            place = moved + tl.cumsum(taken, 0) - taken
            tl.store(aside_p + place, x, mask=inside)
            moved += tl.sum(taken, 0)
        tl.debug_barrier()
        place = tl.arange(0, FEW)
        x = tl.load(aside_p + place, mask=place < moved, other=float("-inf"))
        keys = tl.where(place < moved, ordered(x).to(tl.int64), low_key - 1)
        weight = tl.where(place < moved, tl.exp(x - peak) if BY_MASS else 1.0, 0.0)
        while high_key - low_key > 1:
            middle = low_key + ((high_key - low_key) >> 1)
            if beyond + tl.sum(tl.where(keys >= middle, weight, 0.0), 0) >= wanted:
                low_key = middle
            else:
                high_key = middle
        tl.debug_barrier()
    return unordered(low_key)


@triton.jit
def _filter(
    x_p, top_k_p, top_p_p, min_p_p, aside_p, width, BLOCK: tl.constexpr, FEW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_p = x_p + row * width
    aside_p += row * FEW
    top_k, top_p = tl.load(top_k_p + row), tl.load(top_p_p + row)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        x = tl.load(row_p + columns, mask=columns < width, other=float("-inf"))
        highest = tl.maximum(highest, x)
        lowest = tl.minimum(lowest, tl.where(x == float("-inf"), float("inf"), x))
    peak, floor = tl.max(highest, 0), tl.min(lowest, 0)
    if (peak > float("-inf")) & (peak < float("inf")):
        min_p = tl.load(min_p_p + row)
        kept = floor
        if min_p > 0.0:
            kept = tl.maximum(floor, peak + tl.log(min_p))
        if (top_k > 0) & (top_k < width):
            kth = _smallest_kept(
                row_p, aside_p, width, floor, peak, top_k.to(tl.float32), False, BLOCK, FEW
            )
            kept = tl.maximum(kept, kth)
        if top_p < 1.0:
            mass = tl.zeros((BLOCK,), tl.float32)
            for begin in range(0, width, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                x = tl.load(row_p + columns, mask=columns < width, other=float("-inf"))
                mass += tl.where(x >= kept, tl.exp(x - peak), 0.0)
            wanted = top_p * tl.sum(mass, 0)
            kept = _smallest_kept(row_p, aside_p, width, kept, peak, wanted, True, BLOCK, FEW)
        for begin in range(0, width, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            x = tl.load(row_p + columns, mask=columns < width, other=0.0)
            tl.store(row_p + columns, float("-inf"), mask=(columns < width) & (x < kept))


def filter_logits(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """-inf outside the kept set, in place; see contracts/ops/ for the set."""
    logits = logits if logits.is_contiguous() else logits.contiguous()
    rows, width = logits.shape
    items = -(-width // (_CLUSTER * _THREADS))
    if rows and logits.is_cuda and items <= _MOST_ITEMS and native.has_wgmma():
        sizes = {"ITEMS": items, "THREADS": _THREADS, "CLUSTER": _CLUSTER}
        arguments = [logits, top_k, top_p, min_p, width]
        kernel = native.function("filter", sizes)
        shared = 4 * items * _THREADS
        native.launch(
            kernel, (rows, 1, _CLUSTER), _THREADS, arguments, shared=shared, cluster=_CLUSTER
        )
    elif rows:
        aside = torch.empty((rows, _FEW), dtype=torch.float32, device=logits.device)
        _filter[(rows,)](
            logits, top_k, top_p, min_p, aside, width, BLOCK=_BLOCK, FEW=_FEW,
            **options(num_warps=16),
        )  # fmt: skip
    return logits
