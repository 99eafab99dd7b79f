"""Gates, gated norms and the order of outputs around recurrences: fd-models' recurrent/gates.py
defines them. A row is one program's, or part of one's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .common import cdiv, join_chain, options, pad2
from .norm import warps

_MOST_PARTS = 4


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm(
    x_p, gate_p, w_p, y_p, num_rows, stride0, stride1, w_stride, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    GATE_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = rows // HEADS, rows % HEADS
    mask = (rows < num_rows)[:, None] & (cols < WIDTH)[None, :]
    weight = tl.load(w_p + (head * w_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
    join_chain(PDL)
    place = rows[:, None] * WIDTH + cols[None, :]
    x = tl.load(x_p + place, mask=mask, other=0.0).to(tl.float32)
    of_gate = (token * stride0 + head * stride1)[:, None] + cols[None, :]
    gate = tl.load(gate_p + of_gate, mask=mask, other=0.0).to(tl.float32)
    opened = gate / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        x *= opened
    x *= tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    kind: tl.constexpr = y_p.dtype.element_ty
    # Rounded as the plain code rounds.
    y = (x.to(kind).to(tl.float32) * weight.to(tl.float32)).to(kind)
    if not GATE_FIRST:
        y = (y.to(tl.float32) * opened).to(kind)
    tl.store(y_p + place, y, mask=mask)


@triton.jit
def _add_gated(
    total_p, gate_p, y_p, out_p, total_stride, stride0, stride1, y_stride,
    WIDTH: tl.constexpr, EACH: tl.constexpr, IS_ONE: tl.constexpr, HAS_TOTAL: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    if IS_ONE:
        gate = tl.load(gate_p + row * stride0).to(tl.float32)
    else:
        place = gate_p + row * stride0 + (cols // EACH) * stride1 + cols % EACH
        gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_p + row * y_stride + cols, mask=inside, other=0.0).to(tl.float32)
    y *= tl.sigmoid(gate)
    if HAS_TOTAL:
        y += tl.load(total_p + row * total_stride + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_p + row * WIDTH + cols, y.to(out_p.dtype.element_ty), mask=inside)


@triton.jit
def _regroup(
    x_p, y_p, stride, GROUPS: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    join_chain(PDL)
    size: tl.constexpr = A + B + C + D
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = cols // A * size + cols % A
    if B > 0:
        at = cols - GROUPS * A
        place = tl.where(at >= 0, at // B * size + A + at % B, place)
    if C > 0:
        at = cols - GROUPS * (A + B)
        place = tl.where(at >= 0, at // C * size + (A + B) + at % C, place)
    if D > 0:
        at = cols - GROUPS * (A + B + C)
        place = tl.where(at >= 0, at // D * size + (A + B + C) + at % D, place)
    inside = cols < GROUPS * size
    y = tl.load(x_p + row * stride + place, mask=inside, other=0.0)
    tl.store(y_p + row * (GROUPS * size) + cols, y, mask=inside)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gate_first: bool
) -> torch.Tensor:
    """The norm of x [T, heads, n], times weight [n] or [heads, n], with silu(gate) before or after
    it."""
    x, gate = x.contiguous(), gate if gate.stride(-1) == 1 else gate.contiguous()
    y = torch.empty_like(x)
    tokens, heads, width = x.shape
    if tokens:
        block = pad2(width)
        rows = max(1, 512 // block)
        _gated_norm[(cdiv(tokens * heads, rows),)](
            x, gate, weight.contiguous(), y, tokens * heads, gate.stride(0), gate.stride(1),
            width if weight.ndim > 1 else 0, eps, HEADS=heads, WIDTH=width, BLOCK=block, ROWS=rows,
            GATE_FIRST=gate_first, **options(num_warps=warps(max(block, 512))),
        )  # fmt: skip
    return y


def add_gated(total: torch.Tensor | None, gate: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """total + sigmoid(gate) * y, the sum rounded once. y [T, n], gate [T, heads, n / heads] or
    [T, 1, 1]."""
    y, gate = y if y.stride(-1) == 1 else y.contiguous(), gate.to(y.dtype)
    if total is not None and total.stride(-1) != 1:
        total = total.contiguous()
    tokens, width = y.shape
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    if tokens:
        block = min(1024, pad2(width))
        _add_gated[(tokens, cdiv(width, block))](
            total, gate if gate.stride(-1) == 1 else gate.contiguous(), y, out,
            0 if total is None else total.stride(0), gate.stride(0), gate.stride(1), y.stride(0),
            WIDTH=width, EACH=width // gate.shape[1], IS_ONE=gate.shape[1:] == (1, 1),
            HAS_TOTAL=total is not None, BLOCK=block, **options(num_warps=warps(block)),
        )  # fmt: skip
    return out


def regroup(x: torch.Tensor, groups: int, sizes: Sequence[int]) -> torch.Tensor:
    """x [T, groups * sum(sizes)], whose groups have so many of every part: part by part."""
    tokens, width = x.shape
    a, b, c, d = (*sizes, *[0] * (_MOST_PARTS - len(sizes)))
    y = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if tokens:
        block = min(1024, pad2(width))
        _regroup[(tokens, cdiv(width, block))](
            x, y, x.stride(0), GROUPS=groups, A=a, B=b, C=c, D=d, BLOCK=block,
            **options(num_warps=warps(block)),
        )  # fmt: skip
    return y
