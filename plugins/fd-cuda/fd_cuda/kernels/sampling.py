"""From logits to tokens: penalties, masks, the likeliest token, sampling, log-probabilities.

A row is cut into chunks, so that one row alone keeps many multiprocessors busy; chunks are joined
in a fixed order. Everything here is batch-invariant, waits for nothing and can be captured. The
filter is in filtering.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import cdiv, join_chain, options, pad2
from .random import log_exponential, row_key

_MOST = 4096  # columns of one program
_NOTHING = tl.constexpr(-(2**63))


@triton.jit
def ordered(x):
    """int32 with the order of the floats: NaN is the largest, both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, key, 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """The float of an ordered key, of any integer type."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ranked(x, index):
    """int64 whose largest is the largest x, of the smallest index among equals."""
    return (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _store_best(best, value_p, index_p, place):
    index = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    key = (best >> 32).to(tl.int32)
    value = tl.where(key == 0x7FFFFFFF, float("nan"), unordered(key))
    tl.store(value_p + place, value)
    tl.store(index_p + place, index.to(index_p.dtype.element_ty))


@triton.jit
def _largest_of_chunk(
    x_p, seeds_p, positions_p, value_p, index_p, width, stride,
    RACES: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RACES: of the logits with noise, whose largest is a sample."""
    join_chain(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = columns < width
    x = tl.load(x_p + row * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    score = x
    if RACES:
        # Where everything is forbidden nothing races; most chunks of a filtered row are so.
        if tl.max(tl.where(inside & (x != float("-inf")), 1, 0), 0) > 0:
            key = row_key(tl.load(seeds_p + row), tl.load(positions_p + row))
            score = x - log_exponential(key, columns.to(tl.int64))
    best = tl.max(tl.where(inside, ranked(score, columns), _NOTHING), 0)
    _store_best(best, value_p, index_p, row * tl.num_programs(1) + chunk)


@triton.jit(do_not_specialize=["count"])
def _largest(value_p, index_p, peak_p, id_p, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((), _NOTHING, tl.int64)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < count
        x = tl.load(value_p + row * count + place, mask=inside, other=float("-inf"))
        index = tl.load(index_p + row * count + place, mask=inside, other=0).to(tl.int32)
        best = tl.maximum(best, tl.max(tl.where(inside, ranked(x, index), _NOTHING), 0))
    _store_best(best, peak_p, id_p, row)


@triton.jit
def _penalize(
    x_p, presence_p, frequency_p, repetition_p, counts_p, seen_p, width, counts_stride, seen_stride,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = columns < width
    x = tl.load(x_p + row * width + columns, mask=inside, other=0.0)
    counts = tl.load(counts_p + row * counts_stride + columns, mask=inside, other=0)
    seen = tl.load(seen_p + row * seen_stride + columns, mask=inside, other=0) != 0
    generated = counts > 0
    factor = tl.load(repetition_p + row)
    changed = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor)
    x = tl.where(generated | seen, changed, x)
    x = x - tl.load(frequency_p + row) * counts.to(tl.float32)
    x = x - tl.load(presence_p + row) * generated.to(tl.float32)
    tl.store(x_p + row * width + columns, x, mask=inside)


@triton.jit
def _forbid(x_p, mask_p, width, num_words, CHUNK: tl.constexpr, PDL: tl.constexpr):
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = columns < width
    words = tl.load(mask_p + row * num_words + columns // 32, mask=inside, other=0)
    forbidden = ((words >> (columns % 32)) & 1) == 0
    tl.store(x_p + row * width + columns, float("-inf"), mask=inside & forbidden)


@triton.jit
def _sums(x_p, peak_p, sum_p, width, CHUNK: tl.constexpr, PDL: tl.constexpr):
    join_chain(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_p + row * width + columns, mask=columns < width, other=float("-inf"))
    peak = tl.max(x, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(peak_p + place, peak)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(sum_p + place, tl.sum(tl.exp(x - shift), 0))


@triton.jit
def _log_softmax(
    x_p, y_p, peak_p, sum_p, width, chunks,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    peaks = tl.load(peak_p + row * chunks + part, mask=part < chunks, other=float("-inf"))
    sums = tl.load(sum_p + row * chunks + part, mask=part < chunks, other=0.0)
    peak = tl.max(peaks, 0)
    peaks = tl.where(peaks == float("-inf"), 0.0, tl.exp(peaks - peak))
    total = tl.log(tl.sum(sums * peaks, 0))
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_p + row * width + columns, mask=columns < width, other=0.0)
    tl.store(y_p + row * width + columns, (x - peak) - total, mask=columns < width)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The largest of each row, the smallest id among equals, NaN before all: [B] int64."""
    return greedy_of(logits)[0]


def greedy_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [B] int64, their logits [B] float32) of logits in any float dtype."""
    return _largest_of(logits, None, None)


def sample(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per row from softmax(logits), by an exponential race: [B] int64."""
    return _largest_of(logits, seeds, positions)[0]


def _largest_of(
    logits: torch.Tensor, seeds: torch.Tensor | None, positions: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """greedy_of, or with seeds of a race."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, width = logits.shape
    value, index = _chunks(logits, rows, width)
    if rows:
        _largest_of_chunk[value.shape](
            logits, seeds, positions, value, index, width, logits.stride(0),
            RACES=seeds is not None, CHUNK=_chunk(width), **options(num_warps=8),
        )  # fmt: skip
    return largest(value, index)


def largest(value: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [B] int64, values [B] float32): of each row of value [B, n] float32 the largest, of
    index [B, n] int32, or int64 if n is 1, what belongs to it, the smallest among equals."""
    rows, count = value.shape
    if count == 1:
        return index.view(rows), value.view(rows)
    ids = torch.empty(rows, dtype=torch.int64, device=value.device)
    peaks = torch.empty(rows, dtype=torch.float32, device=value.device)
    if rows:
        _largest[(rows,)](
            value, index, peaks, ids, count, BLOCK=min(4096, pad2(count)), **options(num_warps=4)
        )
    return ids, peaks


def apply_penalties(
    logits: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor,
) -> torch.Tensor:
    """Penalise tokens that occurred, in place."""
    logits, rows, width = _own(logits)
    if rows:
        _penalize[(rows, cdiv(width, _chunk(width)))](
            logits, presence, frequency, repetition, output_counts, prompt_seen, width,
            output_counts.stride(0), prompt_seen.stride(0), CHUNK=_chunk(width),
            **options(num_warps=8),
        )  # fmt: skip
    return logits


def apply_bitmask(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-inf where the bit is not set, in place."""
    logits, rows, width = _own(logits)
    if rows:
        _forbid[(rows, cdiv(width, _chunk(width)))](
            logits,
            mask.contiguous(),
            width,
            mask.shape[1],
            CHUNK=_chunk(width),
            **options(num_warps=8),
        )
    return logits


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """[B, V] float32."""
    logits, rows, width = _own(logits)
    y = torch.empty_like(logits)
    if rows:
        peak, _ = _chunks(logits, rows, width)
        total = torch.empty_like(peak)
        _sums[peak.shape](logits, peak, total, width, CHUNK=_chunk(width), **options(num_warps=8))
        _log_softmax[peak.shape](
            logits, y, peak, total, width, peak.shape[1], CHUNK=_chunk(width),
            PARTS=pad2(peak.shape[1]),
            **options(num_warps=8),
        )  # fmt: skip
    return y


def _own(logits: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    return (logits if logits.is_contiguous() else logits.contiguous()), *logits.shape


def _chunk(width: int) -> int:
    """Columns of one program."""
    return min(_MOST, pad2(width))


def _chunks(logits: torch.Tensor, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for a value and an index of every chunk of every row."""
    shape = (rows, cdiv(width, _chunk(width)))
    value = torch.empty(shape, dtype=torch.float32, device=logits.device)
    dtype = torch.int64 if shape[1] == 1 else torch.int32  # of one chunk, indices are the ids
    return value, torch.empty(shape, dtype=dtype, device=logits.device)
