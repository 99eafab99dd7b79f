"""min_p, top_k and top_p without sorting. On Hopper native/filter.cu does it; here is the same in
Triton: one program per row finds the smallest logit that is kept.

What is kept are the largest logits down to some value, so only that value is sought. Each pass over
the row halves the range that it lies in, by what lies at or above the middle, and narrows it to
logits that there are. Counts and sums are taken in a fixed order, so the result is the same every
time and in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import native
from .common import join_chain, options

_BLOCK = 4096
# native/filter.cu: a row in the shared memory of a cluster of blocks.
_CLUSTER, _THREADS, _MOST_ITEMS = 8, 512, 51


@triton.jit
def _smallest_kept(row_p, width, low, peak, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest value v of the row such that what lies at or above v is at least `wanted`: a
    number of logits, or with BY_MASS the sum of exp(x - peak). low, where v would be smaller. The
    row's values are at most peak."""
    high = peak
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle > low, middle, high)
        amount = tl.zeros((BLOCK,), tl.float32)
        above = tl.full((BLOCK,), float("inf"), tl.float32)
        below = tl.zeros((BLOCK,), tl.float32) + low
        for begin in range(0, width, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            x = tl.load(row_p + columns, mask=columns < width, other=float("-inf"))
            is_above = x >= middle
            amount += tl.where(is_above, tl.exp(x - peak) if BY_MASS else 1.0, 0.0)
            above = tl.minimum(above, tl.where(is_above, x, float("inf")))
            below = tl.maximum(below, tl.where(is_above, low, x))
        if tl.sum(amount, 0) >= wanted:
            low = tl.min(above, 0)
        else:
            high = tl.max(below, 0)
    return low


@triton.jit
def _filter(
    x_p, top_k_p, top_p_p, min_p_p, width, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_p = x_p + row * width
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
            wanted = top_k.to(tl.float32)
            kept = tl.maximum(kept, _smallest_kept(row_p, width, floor, peak, wanted, False, BLOCK))
        if top_p < 1.0:
            mass = tl.zeros((BLOCK,), tl.float32)
            for begin in range(0, width, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                x = tl.load(row_p + columns, mask=columns < width, other=float("-inf"))
                mass += tl.where(x >= kept, tl.exp(x - peak), 0.0)
            wanted = top_p * tl.sum(mass, 0)
            kept = _smallest_kept(row_p, width, kept, peak, wanted, True, BLOCK)
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
        _filter[(rows,)](logits, top_k, top_p, min_p, width, BLOCK=_BLOCK, **options(num_warps=16))
    return logits
