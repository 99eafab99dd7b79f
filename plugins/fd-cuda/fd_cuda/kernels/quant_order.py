"""Activations put in the order in which quant_tile.cu and quant_persistent.cu read them: rows by expert."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from .common import cdiv, join_chain, options, pad2
from .routing import Order

_ROWS: Final = 8  # of a program, of one block
_COLUMNS: Final = 1024


@triton.jit(do_not_specialize=["num_slots"])
def _gather(
    x_p, y_p, scales_p, y_scales_p, slots_p, experts_p, num_slots, width, x_stride, num_scales, stride, y_stride,
    DIVISOR: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """scales_p: [num_scales, T], rows apart by `stride`; SCALES: room for so many, 0 without them."""
    join_chain(PDL)
    first = tl.program_id(0) * ROWS
    if tl.load(experts_p + first // BLOCK) >= 0:
        rows = first + tl.arange(0, ROWS)
        slots = tl.load(slots_p + rows)
        own = slots // DIVISOR
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = (slots < num_slots)[:, None] & (columns < width)[None, :]
        from_p = x_p + own.to(tl.int64)[:, None] * x_stride + columns[None, :]
        to_p = y_p + rows.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(to_p, tl.load(from_p, mask=mask), mask=mask)
        if SCALES and tl.program_id(1) == 0:
            which = tl.arange(0, SCALES)[:, None]
            inside = (slots < num_slots)[None, :] & (which < num_scales)
            scales = tl.load(scales_p + which * stride + own[None, :], mask=inside)
            tl.store(y_scales_p + which * y_stride + rows[None, :], scales, mask=inside)


def gathered(x: torch.Tensor, order: Order, num_slots: int, divisor: int) -> torch.Tensor:
    """Rows slot // divisor of x in the order of the blocks; rows that no slot has are left as they are."""
    y = torch.empty((len(order.slots), x.shape[1]), dtype=x.dtype, device=x.device)
    _launch(x, y, None, None, order, num_slots, divisor)
    return y


def gathered_numbers(
    x: torch.Tensor, scales: torch.Tensor, order: Order, num_slots: int, divisor: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of int8 or fp8 numbers with scales [T], or [T, blocks] with tokens fastest, as they come out."""
    num_rows = len(order.slots)
    y = torch.empty((num_rows, x.shape[1]), dtype=x.dtype, device=x.device)
    by_block = scales.t() if scales.dim() == 2 else scales[None]
    y_scales = torch.empty((len(by_block), num_rows), dtype=scales.dtype, device=x.device)
    _launch(x.view(torch.int16), y.view(torch.int16), by_block, y_scales, order, num_slots, divisor)
    return y, y_scales.t() if scales.dim() == 2 else y_scales[0]


def _launch(
    x: torch.Tensor,
    y: torch.Tensor,
    scales: torch.Tensor | None,
    y_scales: torch.Tensor | None,
    order: Order,
    num_slots: int,
    divisor: int,
) -> None:
    num_rows, width = y.shape
    count = 0 if scales is None else len(scales)
    _gather[(cdiv(num_rows, _ROWS), cdiv(width, _COLUMNS))](
        x, y, x if scales is None else scales, y if y_scales is None else y_scales, order.slots,
        order.experts, num_slots, width, x.stride(0), count,
        0 if scales is None else scales.stride(0), num_rows, DIVISOR=divisor,
        BLOCK=num_rows // len(order.experts), ROWS=_ROWS, COLUMNS=_COLUMNS,
        SCALES=pad2(count) if count else 0, **options(num_warps=4),
    )  # fmt: skip
