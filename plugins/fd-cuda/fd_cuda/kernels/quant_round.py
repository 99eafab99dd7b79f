"""Activations rounded as formats want them: to int8 or fp8, by token, by 128 inputs, or by a fixed
scale.

The numbers come out as int8 or fp8, or for the kernels of quant_native.py in a float that holds
them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from .common import INTERPRETED, join_chain, num_processors, options, pad2

if TYPE_CHECKING:
    from .routing import Order

INT8_BOUND: Final = 127.0
FP8_BOUND: Final = 448.0
FP8_BLOCK: Final = 128
TINY: Final = tl.constexpr(1e-12)
_MOST_AT_ONCE: Final = 8192
_MANY_ROWS: Final = 1024  # fill the card with few warps each
_INTERPRETED: Final = tl.constexpr(INTERPRETED)


@dataclass(frozen=True, slots=True)
class Seen:
    """Activations as a product takes them: numbers [rows or more, K], what each row, or block of
    its inputs, is to be multiplied with (None: they are not rounded), and the dtype that they
    had."""

    numbers: torch.Tensor
    scales: torch.Tensor | None
    rows: int
    dtype: torch.dtype

    def values(self) -> torch.Tensor:
        """What the numbers mean, of rows that have a scale each."""
        if self.scales is None:
            return self.numbers
        return (self.numbers.float() * self.scales[:, None]).to(self.dtype)


@triton.jit
def round_even(x):
    """Rounded to the nearest integer: what is added pushes the fraction out of a float32."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_fp8(x):
    """Rounded to float8_e4m3fn, still float32: three bits after the leading one, down to 2^-9."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    # The power of two that moves the last kept bit to the place of ones.
    shift = tl.where(exponent > 121, 257 - exponent, 136) << 23
    power = shift.to(tl.float32, bitcast=True)
    inverse = ((254 << 23) - shift).to(tl.float32, bitcast=True)
    return round_even(x * power) * inverse


@triton.jit
def quotient(
    x, scale, TO: tl.constexpr, BOUND: tl.constexpr, IS_FP8: tl.constexpr, CONVERTS: tl.constexpr
):
    """x / scale, correctly rounded, to what the format holds, as dtype TO. CONVERTS: the card has
    an instruction for fp8."""
    if _INTERPRETED:
        value = tl.div_rn(x, scale)
    else:
        # By Markstein: with a correctly rounded reciprocal one correction is enough.
        inverse = tl.div_rn(scale * 0.0 + 1.0, scale)
        near = x * inverse
        value = tl.fma(tl.fma(-near, scale, x), inverse, near)
    if IS_FP8 and CONVERTS:
        return value.to(tl.float8e4nv).to(TO)  # saturates
    value = tl.minimum(tl.maximum(value, -BOUND), BOUND)
    return (round_fp8(value) if IS_FP8 else round_even(value)).to(TO)


@triton.jit
def _is_used(row, experts_p, slots_p, num_slots, EACH: tl.constexpr):
    """Whether the row's block of EACH has an expert, and a slot the row; 0: there are no such
    blocks."""
    is_used = row >= 0
    if EACH:
        is_used = tl.load(experts_p + row // EACH) >= 0
        is_used = is_used & (tl.load(slots_p + row) < num_slots)
    return is_used


@triton.jit
def _inputs(at, BY_WORDS: tl.constexpr):
    """Which inputs stand at these places."""
    if BY_WORDS:
        at = (at & -16) | ((at & 15) >> 1) | ((at & 1) << 3)
    return at


@triton.jit
def _store(to_p, step, value, mask, row, places_p, COPIES: tl.constexpr):
    """At the row, or at the place of each of its COPIES, negative where it has none."""
    if COPIES:
        for nth in tl.static_range(COPIES):
            place = tl.load(places_p + row * COPIES + nth).to(tl.int64)
            tl.store(to_p + place * step, value, mask=mask & (place >= 0))
    else:
        tl.store(to_p + row * step, value, mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def _round_rows(
    x_p, y_p, scales_p, given_p, experts_p, slots_p, places_p, num_slots, width, stride,
    BLOCK: tl.constexpr, TURNS: tl.constexpr, SIZE: tl.constexpr, BOUND: tl.constexpr,
    IS_FP8: tl.constexpr, IS_STATIC: tl.constexpr, CONVERTS: tl.constexpr, EACH: tl.constexpr,
    COPIES: tl.constexpr, BY_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SIZE: so many inputs are rounded by a scale of their own, and come out relative to the
    row's."""
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    if _is_used(row, experts_p, slots_p, num_slots, EACH):
        columns = tl.arange(0, BLOCK)
        from_p = x_p + row * stride
        x = tl.load(from_p + _inputs(columns, BY_WORDS), mask=columns < width, other=0.0)
        x = x.to(tl.float32)
        if IS_STATIC:
            scale = tl.load(given_p)
        else:
            peak = tl.abs(x)
            for turn in tl.static_range(1, TURNS):
                at = columns + turn * BLOCK
                more = tl.load(from_p + at, mask=at < width, other=0.0).to(tl.float32)
                peak = tl.maximum(peak, tl.abs(more))
            scale = tl.maximum(tl.div_rn(tl.max(peak, 0), BOUND), TINY)
        _store(scales_p, 1, scale, row >= 0, row, places_p, COPIES)
        for turn in tl.static_range(TURNS):
            at = columns + turn * BLOCK
            if turn:
                x = tl.load(from_p + _inputs(at, BY_WORDS), mask=at < width, other=0.0)
                x = x.to(tl.float32)
            if SIZE:
                parts = tl.reshape(x, (BLOCK // SIZE, SIZE))
                own = tl.maximum(tl.div_rn(tl.max(tl.abs(parts), 1), BOUND), TINY)
                parts = quotient(parts, own[:, None], tl.float32, BOUND, IS_FP8, CONVERTS)
                number = tl.reshape(parts * (own / scale)[:, None], (BLOCK,))
                number = number.to(y_p.dtype.element_ty)
            else:
                number = quotient(x, scale, y_p.dtype.element_ty, BOUND, IS_FP8, CONVERTS)
            _store(y_p + at, width, number, at < width, row, places_p, COPIES)


@triton.jit(do_not_specialize=["scale_stride"])
def _round_blocks(
    x_p, y_p, scales_p, places_p, width, stride, num_blocks, scale_stride,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr, BOUND: tl.constexpr, CONVERTS: tl.constexpr,
    COPIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """scales_p: [blocks, T], blocks apart by scale_stride."""
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_p + row * stride + at, mask=at < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), BOUND), TINY)
    number = quotient(x, scale[:, None], y_p.dtype.element_ty, BOUND, True, CONVERTS)
    to_p = scales_p + block * scale_stride
    _store(to_p, 1, scale, block < num_blocks, row, places_p, COPIES)
    _store(y_p + at, width, number, at < width, row, places_p, COPIES)


@functools.cache
def converts_fp8() -> bool:
    """Whether the card converts to fp8 (compute capability 8.9 and above)."""
    if INTERPRETED or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (8, 9)


def round_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    *,
    is_fp8: bool,
    order: Order | None = None,
    into: Order | None = None,
    by_words: bool = False,
    by_block: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers [T, K] in dtype, what each row is to be multiplied with [T]). `scale` [1] is fixed.
    `order`: that of the rows, of which those without a slot are left out; `into`: the one in which
    they come out, each as often as it has assignments, with nothing where nobody is. `by_words`:
    of every sixteen inputs 0, 8, 1, 9, ... as the words of a slab of int4 have them. `by_block`:
    every 128 inputs are rounded by their own largest, and come out relative to the row's."""
    rows, width = x.shape
    held = rows if into is None else len(into.slots)
    y = torch.empty((held, width), dtype=dtype, device=x.device)
    scales = torch.empty((held,), dtype=torch.float32, device=x.device)
    if rows:
        block = max(FP8_BLOCK, min(pad2(width), _MOST_AT_ONCE))
        # A warp for two thousand numbers, or all four or eight at a row's reduction.
        warps = max(1, block // 2048) if rows >= _MANY_ROWS else 8 if block > 1024 else 4
        _round_rows[(rows,)](
            x, y, scales, scales if scale is None else scale,
            scales if order is None else order.experts, scales if order is None else order.slots,
            scales if into is None else into.places, _num_slots(order), width, x.stride(0),
            BLOCK=block,
            TURNS=triton.cdiv(width, block), SIZE=FP8_BLOCK if by_block else 0,
            BOUND=FP8_BOUND if is_fp8 else INT8_BOUND,
            IS_FP8=is_fp8, IS_STATIC=scale is not None, CONVERTS=converts_fp8(),
            EACH=_each(order, rows), COPIES=_copies(into, rows), BY_WORDS=by_words,
            **options(num_warps=warps),
        )  # fmt: skip
    return y, scales


def _each(order: Order | None, rows: int) -> int:
    """Rows of its blocks."""
    return 0 if order is None else rows // len(order.experts)


def _num_slots(order: Order | None) -> int:
    """Slots from it on are nobody's."""
    if order is None:
        return 0
    if order.places is None:
        raise TypeError("rows are in an order that does not say how many there are")
    return len(order.places)


def _copies(into: Order | None, rows: int) -> int:
    """Of a row; 0: it stays where it is."""
    if into is None:
        return 0
    if into.places is None:
        raise TypeError("rows are to come out in an order that does not say where each goes")
    return len(into.places) // rows


def fp8_blocks(
    x: torch.Tensor, whole: int = 1, into: Order | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 [T, K], scales [T, blocks of 128 inputs], tokens fastest), T up to whole fours or such:
    what is filled up with means nothing. `into` as in round_rows."""
    rows, width = x.shape
    held = -(-rows // whole) * whole if into is None else len(into.slots)
    y = torch.empty((held, width), dtype=torch.float8_e4m3fn, device=x.device)
    blocks = triton.cdiv(width, FP8_BLOCK)
    scales = torch.empty((blocks, held), dtype=torch.float32, device=x.device)
    if rows:
        each = min(pad2(blocks), 4 if INTERPRETED else 8 if rows < num_processors() else 32)
        _round_blocks[(rows, triton.cdiv(blocks, each))](
            x, y, scales, scales if into is None else into.places, width, x.stride(0), blocks,
            scales.stride(0), BLOCKS=each, SIZE=FP8_BLOCK, BOUND=FP8_BOUND,
            CONVERTS=converts_fp8(), COPIES=_copies(into, rows),
            **options(num_warps=max(1, each // 16) if rows >= _MANY_ROWS else 4),
        )  # fmt: skip
    return y, scales.t()
