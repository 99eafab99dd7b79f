"""Activations put in the order in which quant_tile.cu and quant_persistent.cu read them: rows by expert."""

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
    DIVISOR: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """DIVISOR 0: rows stay where they are. TURNED: pairs of inputs, 32 in a turn, that lane q has for half h of step s
    come to place 8 s + 4 h + q from place 8 q + 2 s + h (native/quant.cuh on inputs by rows)."""
    join_chain(PDL)
    first = tl.program_id(0) * ROWS
    if tl.load(experts_p + first // BLOCK) >= 0:
        rows = first + tl.arange(0, ROWS)
        slots = tl.load(slots_p + rows)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = (slots < num_slots)[:, None] & (columns < width)[None, :]
        row = rows if DIVISOR == 0 else slots // DIVISOR
        own = columns
        if TURNED:
            own = (own & ~31) + (own & 3) * 8 + (own >> 3 & 3) * 2 + (own >> 2 & 1)
        from_p = x_p + row.to(tl.int64)[:, None] * x_stride + own[None, :]
        to_p = y_p + rows.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(to_p, tl.load(from_p, mask=mask), mask=mask)


def gathered(
    x: torch.Tensor, order: Order, num_slots: int, divisor: int, *, turned: bool = False
) -> torch.Tensor:
    """Rows slot // divisor of x in the order of the blocks, or with divisor 0 rows that are in it; those that no slot
    has are left as they are. `turned`: for weights that lie by rows to be read as if they did not."""
    num_rows, given = len(order.slots), x.view(torch.int32) if turned else x
    width = given.shape[1]
    y = torch.empty((num_rows, width), dtype=given.dtype, device=x.device)
    _gather[(cdiv(num_rows, _ROWS), cdiv(width, _COLUMNS))](
        given, y, order.slots, order.experts, num_slots, width, given.stride(0),
        DIVISOR=divisor, TURNED=turned, BLOCK=num_rows // len(order.experts), ROWS=_ROWS,
        COLUMNS=_COLUMNS, **options(num_warps=4),
    )  # fmt: skip
    return y.view(x.dtype)
