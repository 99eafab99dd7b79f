"""Root-mean-square norms and the gated activation. All are batch-invariant: a row is one
program's, and where FD_BATCH_INVARIANT asks for it, as many warps' whatever the number of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import batch_invariant, cdiv, join_chain, options, pad2

_MANY = 4096  # rows from which on they fill the GPU: fewer warps have one, or each one its own
_WIDEST = 2048  # of rows that one program activates


@triton.jit(do_not_specialize=["num_rows", "inner"])
def _rms_norm(
    x_p, w_p, y_p, num_rows, inner, stride0, stride1, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    weight = tl.load(w_p + cols, mask=inside, other=0.0).to(tl.float32)
    join_chain(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (rows < num_rows)[:, None] & inside[None, :]
    start = (rows // inner) * stride0 + (rows % inner) * stride1
    x = tl.load(x_p + start[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    y = x * scale[:, None] * weight[None, :]
    tl.store(y_p + rows[:, None] * WIDTH + cols[None, :], y.to(y_p.dtype.element_ty), mask=mask)


@triton.jit
def added_norm(
    x_p, r_p, w_p, total_p, x_stride, r_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """This program's row of x + r, normed: float32, before it is rounded to x's dtype. The sum goes
    to total_p."""
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    weight = tl.load(w_p + cols, mask=inside, other=0.0).to(tl.float32)
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_p + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(r_p + row * r_stride + cols, mask=inside, other=0.0).to(tl.float32)
    total = x.to(total_p.dtype.element_ty)
    tl.store(total_p + row * WIDTH + cols, total, mask=inside)
    x = total.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight


@triton.jit
def _add_rms_norm(
    x_p, r_p, w_p, y_p, total_p, x_stride, r_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    y = added_norm(x_p, r_p, w_p, total_p, x_stride, r_stride, eps, WIDTH, BLOCK, PDL)
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    tl.store(y_p + row * WIDTH + cols, y.to(y_p.dtype.element_ty), mask=cols < WIDTH)


@triton.jit
def _concat_rms_norm(
    x_p, y_p, x_weight_p, y_weight_p, out_p, x_stride, y_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if half == 0:
        place = x_p + row * x_stride + cols
        weight = tl.load(x_weight_p + cols, mask=inside, other=0.0)
    else:
        place = y_p + row * y_stride + cols
        weight = tl.load(y_weight_p + cols, mask=inside, other=0.0)
    join_chain(PDL)
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight.to(tl.float32)
    tl.store(out_p + (2 * row + half) * WIDTH + cols, y.to(out_p.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_q", "num_k"])
def _qk_norm(
    q_p, k_p, qw_p, kw_p, num_q, num_k, q0, q1, k0, k1, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    heads = tl.arange(0, HEADS)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        place = q_p + token * q0 + heads[:, None] * q1 + cols[None, :]
        mask = (heads < num_q)[:, None] & inside[None, :]
        weight = tl.load(qw_p + cols, mask=inside, other=0.0)
    else:
        place = k_p + token * k0 + heads[:, None] * k1 + cols[None, :]
        mask = (heads < num_k)[:, None] & inside[None, :]
        weight = tl.load(kw_p + cols, mask=inside, other=0.0)
    join_chain(PDL)
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    y = x * scale[:, None] * weight.to(tl.float32)[None, :]
    tl.store(place, y.to(q_p.dtype.element_ty), mask=mask)


@triton.jit
def activated(x_p, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """This program's part of a row of silu(gate) * up: float32, before it is rounded to x's
    dtype."""
    join_chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    gate = tl.load(x_p + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_p + row * stride + WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_and_mul(x_p, y_p, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    y = activated(x_p, stride, WIDTH, BLOCK, PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_p + row * WIDTH + cols, y.to(y_p.dtype.element_ty), mask=cols < WIDTH)


def warps(width: int) -> int:
    return max(1, min(8, pad2(width) // 256))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] over its root mean square, times weight [H]."""
    width = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = y.numel() // width
    if not num_rows:
        return y
    if x.ndim > 3 or x.stride(-1) != 1:
        x = x.contiguous().view(-1, width)
    inner = x.shape[-2] if x.ndim == 3 else 1
    stride1 = x.stride(1) if x.ndim == 3 else 0
    block = pad2(width)
    rows, num_warps = max(1, 512 // block), warps(width)
    if num_rows >= _MANY and not batch_invariant():
        if block == 1024:
            rows = num_warps = 2
        elif 2048 < width < 4096:
            num_warps = 4
    _rms_norm[(cdiv(num_rows, rows),)](
        x, weight, y, num_rows, inner, x.stride(0) if x.ndim > 1 else 0, stride1, eps,
        WIDTH=width, BLOCK=block, ROWS=rows, **options(num_warps=num_warps),
    )  # fmt: skip
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s), s) of the sum s = x + residual, [T, H]; the sum is rounded before it is
    normed."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    residual = residual if residual.stride(-1) == 1 else residual.contiguous()
    y, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if x.shape[0]:
        width = x.shape[1]
        _add_rms_norm[(x.shape[0],)](
            x, residual, weight, y, total, x.stride(0), residual.stride(0), eps,
            WIDTH=width, BLOCK=pad2(width), **options(num_warps=warps(width)),
        )  # fmt: skip
    return y, total


def concat_rms_norm(
    x: torch.Tensor, x_weight: torch.Tensor, y: torch.Tensor, y_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """rms_norm of x [T, H], beside it rms_norm of y [T, H]: [T, 2H]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = y if y.stride(-1) == 1 else y.contiguous()
    num_rows, width = x.shape
    out = torch.empty((num_rows, 2 * width), dtype=x.dtype, device=x.device)
    if num_rows:
        _concat_rms_norm[(num_rows, 2)](
            x, y, x_weight, y_weight, out, x.stride(0), y.stride(0), eps,
            WIDTH=width, BLOCK=pad2(width), **options(num_warps=warps(width)),
        )  # fmt: skip
    return out


def qk_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every head of q [T, Hq, D] and k [T, Hk, D] normed where it lies."""
    if q.stride(-1) != 1 or k.stride(-1) != 1:
        q, k = q.contiguous(), k.contiguous()
    if q.shape[0]:
        width, heads = q.shape[2], pad2(max(q.shape[1], k.shape[1]))
        _qk_norm[(q.shape[0], 2)](
            q, k, q_weight, k_weight, q.shape[1], k.shape[1], q.stride(0), q.stride(1),
            k.stride(0), k.stride(1), eps, WIDTH=width, BLOCK=pad2(width), HEADS=heads,
            **options(num_warps=max(1, min(8, heads * pad2(width) // 512))),
        )  # fmt: skip
    return q, k


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [T, 2I], gate half then up half: [T, I]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    width = x.shape[1] // 2
    y = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    if x.shape[0]:
        block = pad2(width) if width <= _WIDEST else 1024
        _silu_and_mul[(x.shape[0], cdiv(width, block))](
            x, y, x.stride(0), WIDTH=width, BLOCK=block, **options(num_warps=warps(block))
        )
    return y
