"""Activations put in the order in which quant_tile.cu and quant_persistent.cu read them: rows by
expert."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from .common import cdiv, join_chain, options
from .routing import Order

STEP: Final = 128  # inputs of a step of quant_grouped.cu
_ROWS: Final = 8  # of a program, of one block
_COLUMNS: Final = 1024


@triton.jit(do_not_specialize=["num_slots"])
def _gather(
    x_p, y_p, slots_p, experts_p, num_slots, width, y_width, x_stride,
    DIVISOR: tl.constexpr, BLOCK: tl.constexpr, BY_STEPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    first = tl.program_id(0) * ROWS
    if tl.load(experts_p + first // BLOCK) >= 0:
        rows = first + tl.arange(0, ROWS)
        slots = tl.load(slots_p + rows)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inputs = columns
        if BY_STEPS:  # bits 6 to 0 of a place are bits 4, 3, 1, 0, 6, 5, 2 of the input
            inputs = (columns & -128) | ((columns & 6) << 4) | ((columns & 96) >> 2)
            inputs |= ((columns & 1) << 2) | ((columns & 16) >> 3) | ((columns & 8) >> 3)
        is_there = (slots < num_slots)[:, None]
        from_p = x_p + (slots // DIVISOR).to(tl.int64)[:, None] * x_stride + inputs[None, :]
        to_p = y_p + rows.to(tl.int64)[:, None] * y_width + columns[None, :]
        found = tl.load(from_p, mask=is_there & (inputs < width)[None, :], other=0.0)
        tl.store(to_p, found, mask=is_there & (columns < y_width)[None, :])


def gathered(
    x: torch.Tensor, order: Order, num_slots: int, divisor: int, *, by_steps: bool = False
) -> torch.Tensor:
    """Rows slot // divisor of x in the order of the blocks; rows that no slot has are left as they
    are. `by_steps`: inputs as quant_grouped.cu wants them for MXFP4, up to whole 128."""
    num_rows, width = len(order.slots), x.shape[1]
    y_width = cdiv(width, STEP) * STEP if by_steps else width
    y = torch.empty((num_rows, y_width), dtype=x.dtype, device=x.device)
    _gather[(cdiv(num_rows, _ROWS), cdiv(y_width, _COLUMNS))](
        x, y, order.slots, order.experts, num_slots, width, y_width, x.stride(0),
        DIVISOR=divisor, BLOCK=num_rows // len(order.experts), BY_STEPS=by_steps, ROWS=_ROWS,
        COLUMNS=_COLUMNS, **options(num_warps=4),
    )  # fmt: skip
    return y
