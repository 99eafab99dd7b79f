"""Activations put in the order in which quant_tile.cu and quant_persistent.cu read them: rows by
expert."""

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
    """Rows slot // divisor of x in the order of the blocks; rows that no slot has are left as they
    are."""
    num_rows, width = len(order.slots), x.shape[1]
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    _gather[(cdiv(num_rows, _ROWS), cdiv(width, _COLUMNS))](
        x, y, order.slots, order.experts, num_slots, width, x.stride(0),
        DIVISOR=divisor, BLOCK=num_rows // len(order.experts), ROWS=_ROWS, COLUMNS=_COLUMNS,
        **options(num_warps=4),
    )  # fmt: skip
    return y
