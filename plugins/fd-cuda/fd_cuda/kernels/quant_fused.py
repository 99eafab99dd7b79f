"""Norms and activations that round what they yield, for a packed product that stands after them
(Kernel.behind): half the bytes are written, none is read again, and a launch is saved. The same
numbers, bit for bit, as norm.py and then quant_round.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import norm
from .common import cdiv, options, pad2
from .quant_linear import choose, native_runs
from .quant_round import FP8_BLOCK, FP8_BOUND, INT8_BOUND, TINY, Seen, converts_fp8, quotient
from .quant_weights import WHOLE, Weights

_WIDEST = 16384  # numbers of a row that one program holds


@triton.jit
def _store_rounded(
    y, row, first, y_p, scales_p, given_p, scale_stride, eights,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, BOUND: tl.constexpr,
    IS_FP8: tl.constexpr, IS_STATIC: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """y, BLOCK numbers of the row from the first one on, with a scale for all of them or, where
    there is a SIZE, for so many each. scales_p: [T], or [blocks, T], blocks apart by scale_stride.
    eights: WIDTH / 8, of which the compiler knows nothing: so it stores no more than eight numbers
    of a thread at once, gives threads the numbers that those of norm.py have, and sums come out the
    same."""
    cols = first + tl.arange(0, BLOCK)
    if SIZE:
        y = tl.reshape(y, (BLOCK // SIZE, SIZE))
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(y), 1), BOUND), TINY)
        number = quotient(y, scale[:, None], y_p.dtype.element_ty, BOUND, IS_FP8, CONVERTS)
        number = tl.reshape(number, (BLOCK,))
        block = first // SIZE + tl.arange(0, BLOCK // SIZE)
        tl.store(scales_p + block * scale_stride + row, scale, mask=block * SIZE < WIDTH)
    else:
        if IS_STATIC:
            scale = tl.load(given_p)
        else:
            scale = tl.maximum(tl.div_rn(tl.max(tl.abs(y), 0), BOUND), TINY)
        number = quotient(y, scale, y_p.dtype.element_ty, BOUND, IS_FP8, CONVERTS)
        tl.store(scales_p + row, scale)
    tl.store(y_p + row * eights * 8 + cols, number, mask=cols < WIDTH)


@triton.jit(do_not_specialize=["eights"])
def _add_rms_norm_round(
    x_p, r_p, w_p, total_p, y_p, scales_p, given_p, scale_stride, eights, x_stride, r_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, BOUND: tl.constexpr,
    IS_FP8: tl.constexpr, IS_STATIC: tl.constexpr, CONVERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    y = norm.added_norm(x_p, r_p, w_p, total_p, x_stride, r_stride, eps, WIDTH, BLOCK, PDL)
    row = tl.program_id(0).to(tl.int64)
    y = y.to(total_p.dtype.element_ty).to(tl.float32)
    _store_rounded(
        y, row, 0, y_p, scales_p, given_p, scale_stride, eights,
        WIDTH, BLOCK, SIZE, BOUND, IS_FP8, IS_STATIC, CONVERTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["eights"])
def _silu_and_mul_round(
    x_p, y_p, scales_p, given_p, scale_stride, eights, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, BOUND: tl.constexpr,
    IS_FP8: tl.constexpr, IS_STATIC: tl.constexpr, CONVERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    y = norm.activated(x_p, stride, WIDTH, BLOCK, PDL)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    y = y.to(x_p.dtype.element_ty).to(tl.float32)
    _store_rounded(
        y, row, first, y_p, scales_p, given_p, scale_stride, eights,
        WIDTH, BLOCK, SIZE, BOUND, IS_FP8, IS_STATIC, CONVERTS,
    )  # fmt: skip


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: Weights
) -> tuple[torch.Tensor | Seen, torch.Tensor]:
    """norm.add_rms_norm, the normed rows as a product with the weight takes them."""
    num_rows, width = x.shape
    made = _make(x, width, weight)
    if made is None:
        return norm.add_rms_norm(x, residual, norm_weight, eps)
    x = x if x.stride(-1) == 1 else x.contiguous()
    residual = residual if residual.stride(-1) == 1 else residual.contiguous()
    total = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    _add_rms_norm_round[(num_rows,)](
        x, residual, norm_weight, total, *made.arguments, x.stride(0), residual.stride(0), eps,
        WIDTH=width, BLOCK=pad2(width), **made.flags, **options(num_warps=norm.warps(width)),
    )  # fmt: skip
    return made.seen, total


def silu_and_mul(x: torch.Tensor, weight: Weights) -> torch.Tensor | Seen:
    """norm.silu_and_mul, its rows as a product with the weight takes them."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    made = _make(x, width, weight)
    if made is None:
        return norm.silu_and_mul(x)
    x = x if x.stride(-1) == 1 else x.contiguous()
    # Where a row has one scale, one program has the row.
    block = min(1024, pad2(width)) if made.flags["SIZE"] else pad2(width)
    _silu_and_mul_round[(num_rows, cdiv(width, block))](
        x, *made.arguments, x.stride(0), WIDTH=width, BLOCK=block, **made.flags,
        **options(num_warps=max(4, min(16, block // 1024))),
    )  # fmt: skip
    return made.seen


@dataclass(frozen=True, slots=True)
class _Made:
    """What a kernel is to fill, and how it is told."""

    seen: Seen
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]
    flags: dict[str, int | float]


def _make(x: torch.Tensor, width: int, weight: Weights) -> _Made | None:
    """Room for x's rows as a product with the weight takes them; None where it does not round them,
    or to what is made otherwise (few rows with scales of blocks)."""
    slabs, rows, by_block = weight.slabs, x.shape[0], weight.rounding == "block"
    if slabs is None or not rows or width > _WIDEST or not native_runs(x):
        return None
    shape = choose(slabs, rows, rounds=bool(weight.rounding))
    to = weight.number_type(shape)
    if to is None or width % 8 or (by_block and (to == torch.float16 or width < FP8_BLOCK)):
        return None
    held = cdiv(rows, WHOLE) * WHOLE if by_block and shape is None else rows
    y = torch.empty((held, width), dtype=to, device=x.device)
    size = (cdiv(width, FP8_BLOCK), held) if by_block else (held,)
    scales = torch.empty(size, dtype=torch.float32, device=x.device)
    given, is_fp8 = weight.input_scale, weight.rounding != "int8"
    flags = {
        "SIZE": FP8_BLOCK if by_block else 0,
        "BOUND": FP8_BOUND if is_fp8 else INT8_BOUND,
        "IS_FP8": is_fp8,
        "IS_STATIC": given is not None,
        "CONVERTS": converts_fp8(),
    }
    arguments = (y, scales, scales if given is None else given, held, width // 8)
    return _Made(Seen(y, scales.t() if by_block else scales, rows, x.dtype), arguments, flags)
