"""Attention within packed runs of unequal length, as towers of pictures have it: every query of a
run sees all of its keys. For GPUs with a tensor copy engine, in 16 bits.

One program serves some queries of a run and a head. Heads of 80 are computed in parts of 64 and 16,
since tiles are powers of two wide and padding them to 128 would take half as long again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fd_cuda.kernels.common import cdiv, pad2

from .common import LOWEST

if TYPE_CHECKING:
    from torch import Tensor

ROWS, KEYS, WARPS, STAGES = 128, 64, 8, 3  # the fastest on an H200
_ALIGNED = 8  # numbers of 16 bits, in rows that the copy engine reads
_LOG2_E = 1.4426950408889634


@triton.jit
def _turn(
    queries, more_queries, state, acc, more_acc, tiles, row, left, scale,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys: (maximum, total), acc and more_acc after it. left: keys of the run from
    here on; after those stand others', which may be NaN."""
    k, more_k, v, more_v, column = tiles
    scores = tl.dot(queries, tl.trans(k.load([row, column])))
    values = v.load([row, column])
    if RIGHT:
        scores = tl.dot(more_queries, tl.trans(more_k.load([row, column + LEFT])), scores)
        more_values = more_v.load([row, column + LEFT])
    if MASKED:
        inside = tl.arange(0, N) < left
        scores = tl.where(inside[None, :], scores, float("-inf"))
        values = tl.where(inside[:, None], values, 0.0)
        if RIGHT:
            more_values = tl.where(inside[:, None], more_values, 0.0)
    highest, total = state
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_highest[:, None])
    fade = tl.exp2(highest - new_highest)
    total = total * fade + tl.sum(weights, 1)
    weights = weights.to(values.dtype)
    acc = tl.dot(weights, values, acc * fade[:, None])
    if RIGHT:
        more_acc = tl.dot(weights, more_values, more_acc * fade[:, None])
    return (new_highest, total), acc, more_acc


@triton.jit
def packed_attention(
    q, out, k, more_k, v, more_v, starts, scale, stride_q, stride_out,
    WIDTH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the longest run, heads, runs). k, v: descriptors of tiles of LEFT columns;
    more_k, more_v: of RIGHT, which follow. scale: times log2(e)."""
    head, run = tl.program_id(1), tl.program_id(2)
    first, end = tl.load(starts + run), tl.load(starts + run + 1)
    begin = first + tl.program_id(0) * M
    if begin >= end:
        return
    column = head * WIDTH
    tokens, dims = begin + tl.arange(0, M), tl.arange(0, LEFT)
    more = LEFT + tl.arange(0, RIGHT if RIGHT else 16)
    of_run, at = (tokens < end)[:, None], tokens.to(tl.int64)[:, None]
    of_queries = q + at * stride_q + column
    queries = tl.load(of_queries + dims, mask=of_run & (dims < WIDTH), other=0.0)
    more_queries = queries
    acc = tl.zeros([M, LEFT], tl.float32)
    more_acc = acc
    if RIGHT:
        more_queries = tl.load(of_queries + more, mask=of_run & (more < WIDTH), other=0.0)
        more_acc = tl.zeros([M, RIGHT], tl.float32)
    state = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    tiles = k, more_k, v, more_v, column
    whole = end - (end - first) % N
    for row in tl.range(first, whole, N, num_stages=STAGES):
        state, acc, more_acc = _turn(
            queries, more_queries, state, acc, more_acc, tiles, row, N, scale, LEFT, RIGHT, N, False
        )
    if whole < end:
        state, acc, more_acc = _turn(
            queries, more_queries, state, acc, more_acc, tiles, whole, end - whole, scale,
            LEFT, RIGHT, N, True,
        )  # fmt: skip
    share = 1 / state[1][:, None]
    of_out = out + at * stride_out + column
    tl.store(of_out + dims, (acc * share).to(out.dtype.element_ty), of_run & (dims < WIDTH))
    if RIGHT:
        made = (more_acc * share).to(out.dtype.element_ty)
        tl.store(of_out + more, made, of_run & (more < WIDTH))


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether heads are of a size that was measured, and lie as the copy engine reads them."""
    width = q.shape[2]
    return 64 <= width <= 128 and all(
        x.stride(2) == 1
        and x.stride(1) == width
        and x.stride(0) % _ALIGNED == 0
        and x.data_ptr() % (2 * _ALIGNED) == 0
        for x in (q, k, v)
    )


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """See AttendingDevice; where `serves` says so."""
    tokens, heads, width = q.shape
    out = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device)
    left = pad2(width) if pad2(width) - width < 16 else pad2(width) // 2
    right = pad2(max(16, width - left)) if width > left else 0
    grid = cdiv(longest, ROWS), heads, starts.shape[0] - 1
    packed_attention[grid](
        q, out, *_tiles(k, left, right), *_tiles(v, left, right), starts, width**-0.5 * _LOG2_E,
        q.stride(0), out.stride(0), WIDTH=width, LEFT=left, RIGHT=right, M=ROWS, N=KEYS,
        STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return out


def _tiles(x: Tensor, left: int, right: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    rows, tiles = x.flatten(1), TensorDescriptor.from_tensor
    return tiles(rows, [KEYS, left]), tiles(rows, [KEYS, right or left])
