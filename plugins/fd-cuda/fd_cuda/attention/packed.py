"""Attention within runs of unequal length, every query over all keys of its run: towers of
pictures.

Tiles arrive by the tensor copy engine. Heads that are no power of two wide are computed in two
parts, 80 as 64 and 16: padded to 128 they would take half as long again.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from fd_cuda.kernels.common import cdiv, pad2

from .gqa import descriptor

_TILE: Final = 64  # queries, and keys
_MAX_WIDTH: Final = 128
_LOG2_E: Final = 1.4426950408889634


@triton.jit
def _see(
    q1, q2, k1_tiles, k2_tiles, v1_tiles, v2_tiles, at, column, left, scale, top, total, out1, out2,
    N: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One tile of keys, running softmax of base 2: (top, total, out1, out2). LAST: only the first
    `left` are of this run; what is behind them may be anything, NaN too."""
    own = tl.arange(0, N) < left
    scores = tl.dot(q1, k1_tiles.load([at, column]).T)
    if REST:
        scores = tl.dot(q2, k2_tiles.load([at, column + FIRST]).T, scores)
    if LAST:
        scores = tl.where(own[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weights, 1)
    weights = weights.to(q1.dtype)
    values = v1_tiles.load([at, column])
    if LAST:
        values = tl.where(own[:, None], values, 0.0)
    out1 = tl.dot(weights, values, out1 * fade[:, None])
    if REST:
        values = v2_tiles.load([at, column + FIRST])
        if LAST:
            values = tl.where(own[:, None], values, 0.0)
        out2 = tl.dot(weights, values, out2 * fade[:, None])
    return new_top, total, out1, out2


@triton.jit(do_not_specialize=["width"])
def packed_attention(
    q1_tiles, q2_tiles, k1_tiles, k2_tiles, v1_tiles, v2_tiles, out_p, starts_p, scale, width,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the longest run, heads, runs). FIRST, REST: columns of the parts of a head;
    *1_tiles and *2_tiles have so many. width: of all heads."""
    begin, column = tl.program_id(0) * M, tl.program_id(1) * WIDTH
    first = tl.load(starts_p + tl.program_id(2))
    length = tl.load(starts_p + tl.program_id(2) + 1) - first
    if begin < length:
        columns = tl.arange(0, FIRST)
        q1 = q1_tiles.load([first + begin, column])
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        out1 = tl.zeros([M, FIRST], tl.float32)
        q2, out2 = q1, total
        if REST:
            more = FIRST + tl.arange(0, REST)
            q2 = q2_tiles.load([first + begin, column + FIRST])
            if FIRST + REST > WIDTH:  # there the next head begins
                q2 = tl.where((more < WIDTH)[None, :], q2, 0.0)
            out2 = tl.zeros([M, REST], tl.float32)
        whole = length // N * N
        for key in tl.range(0, whole, N, num_stages=STAGES):
            top, total, out1, out2 = _see(
                q1, q2, k1_tiles, k2_tiles, v1_tiles, v2_tiles, first + key, column, N, scale,
                top, total, out1, out2, N, FIRST, REST, False,
            )  # fmt: skip
        if whole < length:
            top, total, out1, out2 = _see(
                q1, q2, k1_tiles, k2_tiles, v1_tiles, v2_tiles, first + whole, column,
                length - whole, scale, top, total, out1, out2, N, FIRST, REST, True,
            )  # fmt: skip
        rows = begin + tl.arange(0, M)
        own = (rows < length)[:, None]
        place = out_p + (first + rows).to(tl.int64)[:, None] * width + column
        total = total[:, None]
        tl.store(place + columns[None, :], (out1 / total).to(out_p.dtype.element_ty), mask=own)
        if REST:
            mask = own & (more < WIDTH)[None, :]
            tl.store(place + more[None, :], (out2 / total).to(out_p.dtype.element_ty), mask=mask)


def can_attend(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine, where there is one, can read them, [tokens, heads, dim] each."""
    width = tensors[0].shape[2]
    if width % 8 or not 16 <= width <= _MAX_WIDTH:
        return False
    return all(
        x.dtype != torch.float32
        and x.stride()[1:] == (width, 1)
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        for x in tensors
    )


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int
) -> torch.Tensor:
    """See AttendingDevice.attend_packed."""
    tokens, heads, width = q.shape
    first = 1 << width.bit_length() - 1
    rest = pad2(max(16, width - first)) if width > first else 0
    out = torch.empty((tokens, heads * width), dtype=q.dtype, device=q.device)
    tiles = []
    for x in (q, k, v):
        flat = x.as_strided(out.shape, (x.stride(0), 1))
        tiles += [descriptor(flat, _TILE, columns) for columns in (first, rest or first)]
    packed_attention[(cdiv(longest, _TILE), heads, starts.shape[0] - 1)](
        *tiles, out, starts, width**-0.5 * _LOG2_E, heads * width,
        WIDTH=width, FIRST=first, REST=rest, M=_TILE, N=_TILE, STAGES=3, num_warps=4,
    )  # fmt: skip
    return out.view(tokens, heads, width)
