"""Products in Triton: one fixed tiling for all numbers of rows (a row never depends on the others),
and the float32 product that scores experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import INTERPRETED, batch_invariant, cdiv, join_chain, options, pad2

# Rows that are scored one by one, each of which reads all weights: twice as many where the weights
# are no more than these.
_FEW, _FEW_WEIGHTS = 16, 1 << 19
_SOME = 512  # rows that make small tiles, unless there are this many large ones
_LARGE_TILES = 16
_MANY = (128, 128, 32)  # rows, experts and channels of a tile where those tiles are many
_NARROW = (64, 64, 64)  # for no more experts than these
_PARTS, _PROGRAMS = 8, 160  # at most, and of large tiles in all parts together
_SMALL_PARTS, _SMALL_PROGRAMS = 32, 512  # the same of small tiles


@triton.jit(do_not_specialize=["num_rows"])
def _matmul(
    x_p, w_p, bias_p, y_p, num_rows, width, depth, x_stride, share,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    x = x_p + rows[:, None] * x_stride + ks[None, :]
    w = w_p + columns[None, :] * depth + ks[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    begin = tl.program_id(2) * share
    for k in range(begin, min(begin + share, depth), BK):
        inside = ks < depth - k
        a = tl.load(x + k, mask=(rows < num_rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(w + k, mask=(columns < width)[None, :] & inside[:, None], other=0.0)
        if WIDE:
            a = a.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_p + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    rows += tl.program_id(2).to(tl.int64) * num_rows
    place = y_p + rows[:, None] * width + columns[None, :]
    tl.store(place, total.to(y_p.dtype.element_ty), mask=mask)


@triton.jit
def _scores(
    x_p, w_p, y_p, width, depth, x_stride,
    BN: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and BN columns; the weights are asked for before the kernel waits for the one
    before."""
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    mask = (columns < width)[:, None]
    w = w_p + columns[:, None] * depth + ks[None, :]
    first = tl.load(w, mask=mask & (ks < depth)[None, :], other=0.0)
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    x = x_p + row * x_stride + ks
    total = first * tl.load(x, mask=ks < depth, other=0.0).to(tl.float32)[None, :]
    for chunk in tl.static_range(1, CHUNKS):
        inside = ks < depth - chunk * BK
        b = tl.load(w + chunk * BK, mask=mask & inside[None, :], other=0.0)
        total += b * tl.load(x + chunk * BK, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(y_p + row * width + columns, tl.sum(total, 1), mask=columns < width)


@triton.jit(do_not_specialize=["size"])
def _sum(parts_p, y_p, size, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Over all parts."""
    join_chain(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts_p + at, mask=at < size, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_p + part * size.to(tl.int64) + at, mask=at < size, other=0.0)
    tl.store(y_p + at, total, mask=at < size)


@triton.jit(do_not_specialize=["num_rows"])
def _scores_of_many(
    x_p, w_p, y_p, num_rows, width, depth, x_stride, share,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """bfloat16 rows. Three numbers of bfloat16 hold all digits of a weight, and products of those
    take half the time that products in TF32 do. The weights stand on the left, since that factor
    comes from registers."""
    join_chain(PDL)
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    x = x_p + rows[:, None] * x_stride + ks[None, :]
    w = w_p + columns[:, None] * depth + ks[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    begin = tl.program_id(2) * share
    for k in range(begin, min(begin + share, depth), BK):
        inside = (ks < depth - k)[None, :]
        a = tl.trans(tl.load(x + k, mask=(rows < num_rows)[:, None] & inside, other=0.0))
        b = tl.load(w + k, mask=(columns < width)[:, None] & inside, other=0.0)
        first = b.to(tl.bfloat16)
        b -= first.to(tl.float32)
        second = b.to(tl.bfloat16)
        third = (b - second.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(third, a, total)
        total = tl.dot(second, a, total)
        total = tl.dot(first, a, total)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    rows += tl.program_id(2).to(tl.int64) * num_rows
    tl.store(y_p + rows[:, None] * width + columns[None, :], tl.trans(total), mask=mask)


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias. Batch-invariant."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, width = x.shape[0], weight.shape[0]
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows:
        is_wide = x.dtype == torch.float32
        tile = (32, 32, 32) if is_wide else (64, 64, 64)
        _product(x, weight, bias, y, tile, "ieee" if is_wide else "tf32", wide=False)
    return y


def linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] in any dtype times weight [N, K] float32, in float32. Batch-invariant where that is
    asked for; else rows of large batches are summed in another order than those of small ones."""
    parts = scores_in_parts(x, weight)
    if parts.shape[0] == 1:
        return parts[0]
    y, block = torch.empty_like(parts[0]), 128
    _sum[(cdiv(y.numel(), block),)](
        parts, y, y.numel(), PARTS=parts.shape[0], BLOCK=block, **options(num_warps=4)
    )
    return y


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 or INTERPRETED else "tf32x3"


def scores_in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """linear_float32 in parts still to be added, [parts, T, N]: rows times a few columns are too
    few tiles for the card."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, (width, depth) = x.shape[0], weight.shape
    is_light = width * depth <= _FEW_WEIGHTS
    is_alone = num_rows <= (2 * _FEW if is_light else _FEW) or batch_invariant()
    large = cdiv(num_rows, 64) * cdiv(width, 64)
    is_small = num_rows <= _SOME and large < _LARGE_TILES
    tile, parts = (64, 64, 32), max(1, min(_PARTS, _PROGRAMS // max(1, large)))
    if is_small:
        small = cdiv(num_rows, 16) * cdiv(width, 64)
        tile, parts = (16, 64, 64), min(_SMALL_PARTS, _SMALL_PROGRAMS // max(1, small))
    is_narrow = width <= _NARROW[1]
    of_many = _NARROW if is_narrow else _MANY
    wide = cdiv(num_rows, of_many[0]) * cdiv(width, of_many[1])
    is_many = x.dtype == torch.bfloat16 and wide >= _LARGE_TILES
    if is_many:
        tile, parts = of_many, max(1, min(_PARTS, _PROGRAMS // wide))
    y = x.new_empty((1 if is_alone else parts, num_rows, width), dtype=torch.float32)
    if not num_rows:
        return y[:1]
    if is_alone:
        # A few weights are all asked for before the kernel waits.
        columns, chunk = (2, 8192) if is_light else (4, 1024)
        chunk = min(chunk, pad2(depth))
        _scores[(num_rows, cdiv(width, columns))](
            x, weight, y, width, depth, x.stride(0), BN=columns, BK=chunk,
            CHUNKS=cdiv(depth, chunk), **options(num_warps=max(4, columns * chunk // 1024)),
        )  # fmt: skip
        return y
    if is_many:
        share = cdiv(cdiv(depth, parts), tile[2]) * tile[2]
        _scores_of_many[(cdiv(num_rows, tile[0]), cdiv(width, tile[1]), parts)](
            x, weight, y, num_rows, width, depth, x.stride(0), share, BM=tile[0], BN=tile[1],
            BK=tile[2],
            **options(num_warps=4 if is_narrow else 8, num_stages=4 if is_narrow else 3),
        )  # fmt: skip
        return y
    # bfloat16 and float16 have fewer digits than TF32, so of x nothing is lost, and three products
    # keep what matters of the weight's.
    _product(x, weight, None, y, tile, _precision(x), wide=True, parts=parts)
    return y


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: tuple[int, int, int],
    precision: str,
    *,
    wide: bool,
    parts: int = 1,
) -> None:
    num_rows, (width, depth) = x.shape[0], weight.shape
    rows, columns, step = tile
    share = cdiv(cdiv(depth, parts), step) * step
    _matmul[(cdiv(num_rows, rows), cdiv(width, columns), parts)](
        x, weight, weight if bias is None else bias, y, num_rows, width, depth, x.stride(0), share,
        BM=rows, BN=columns, BK=step, HAS_BIAS=bias is not None, PRECISION=precision, WIDE=wide,
        **options(num_warps=4, num_stages=3),
    )  # fmt: skip
