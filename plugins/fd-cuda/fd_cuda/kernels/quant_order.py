"""Activations put in the order in which quant_pipe.cu reads them: rows by expert, inputs as CCQ's bytes meet them."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from .common import cdiv, join_chain, options
from .routing import Order

_ROWS: Final = 8  # of a program, of one block
_COLUMNS: Final = 1024


@triton.jit(do_not_specialize=["num_slots"])
def _gather(
    x_p, y_p, slots_p, experts_p, num_slots, width, x_stride,
    DIVISOR: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    first = tl.program_id(0) * ROWS
    if tl.load(experts_p + first // BLOCK) >= 0:
        rows = first + tl.arange(0, ROWS)
        slots = tl.load(slots_p + rows)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = (slots < num_slots)[:, None] & (columns < width)[None, :]
        from_p = x_p + (slots // DIVISOR).to(tl.int64)[:, None] * x_stride + columns[None, :]
        to_p = y_p + rows.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(to_p, tl.load(from_p, mask=mask), mask=mask)


def gathered(x: torch.Tensor, order: Order, num_slots: int, divisor: int) -> torch.Tensor:
    """Rows slot // divisor of x in the order of the blocks; rows that no slot has are left as they are."""
    num_rows, width = len(order.slots), x.shape[1]
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    _gather[(cdiv(num_rows, _ROWS), cdiv(width, _COLUMNS))](
        x, y, order.slots, order.experts, num_slots, width, x.stride(0),
        DIVISOR=divisor, BLOCK=num_rows // len(order.experts), ROWS=_ROWS, COLUMNS=_COLUMNS,
        **options(num_warps=4),
    )  # fmt: skip
    return y


@triton.jit
def _by_codes(x_p, y_p, width, x_stride, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Of pairs of inputs, 32 a turn: 8 step + 4 half + lane comes from 8 lane + 2 step + half."""
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step, half, lane = columns // 8 % 4, columns // 4 % 2, columns % 4
    mask = columns < width
    pairs = tl.load(
        x_p + row * x_stride + columns // 32 * 32 + lane * 8 + step * 2 + half, mask=mask
    )
    tl.store(y_p + row * width + columns, pairs, mask=mask)


def by_codes(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] of two-byte numbers, K in whole turns: a byte of CCQ is four inputs side by side, which the matrix
    units take from two places of a step."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pairs = x.view(torch.int32)
    rows, width = pairs.shape
    _by_codes[(rows, cdiv(width, _COLUMNS))](
        pairs, y.view(torch.int32), width, pairs.stride(0), COLUMNS=_COLUMNS, **options(num_warps=4)
    )
    return y
