"""MXFP4 where quant_any.py's product of tiles loses: one row a matrix, which it would pad to
sixteen, and very many, for which it would unpack the same weights again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeGuard

import torch
import triton
import triton.language as tl

from .common import cdiv, join_chain, options

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight

_GROUP: Final = 32
# Of alone_product: outputs and inputs of a program's step. A warp reads 512 bytes of one output.
COLUMNS: Final = 16
DEPTH: Final = 1024
# Scales that a program of unpack_groups reads.
_UNPACKED: Final = 64


@triton.jit
def numbers_mxfp4(codes):
    """float32 of codes, without scales. A code's last three bits are the last of a float's exponent
    and the first of its mantissa, 126 off in the exponent."""
    wide = codes.to(tl.uint32)
    bits = ((wide & 7) << 22) | ((wide & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126


@triton.jit
def powers_mxfp4(scales):
    """float32 of scales, which are exponents."""
    exponent = scales.to(tl.uint32)
    return tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled_mxfp4(codes, scales, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK] float32. codes: [BN, BK] uint8; scales: [BN, BK // 32] uint8. (`dot_scaled` of
    Triton 3.6 gave wrong sums on an H200.)"""
    spread = tl.reshape(numbers_mxfp4(codes), (BN, BK // 32, 32)) * powers_mxfp4(scales)[:, :, None]
    return tl.reshape(spread, (BN, BK))


@triton.jit
def clamped(total, alpha, limit, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN // 2] of gate and up in turn, as moe_experts_clamped says."""
    gate, up = tl.split(tl.reshape(total, (BM, BN // 2, 2)))
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def alone_product(
    x_p, w_p, scales_p, bias_p, y_p, experts_p, width, row_bytes, x_stride, across, alpha, limit,
    BIAS: tl.constexpr, DIVISOR: tl.constexpr, CLAMPED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (slots * across): x [slot // DIVISOR] times the matrix of the slot's expert, in float32
    without the matrix units. CLAMPED: outputs are gate and up in turn, and half as many are
    stored."""
    join_chain(PDL)
    slot, tile = (tl.program_id(0) // across).to(tl.int64), tl.program_id(0) % across
    expert = tl.load(experts_p + slot).to(tl.int64)
    if expert >= 0:
        columns = tile * BN + tl.arange(0, BN)
        inside_n = columns < width
        outputs = expert * width + columns
        x = x_p + (slot // DIVISOR) * x_stride
        total = tl.zeros((BN, BK // 32), tl.float32)
        for byte in range(0, row_bytes, BK // 2):
            inputs = byte * 2 + tl.arange(0, BK)
            both = tl.load(x + inputs, mask=inputs < row_bytes * 2, other=0.0).to(tl.float32)
            even, odd = tl.split(tl.reshape(both, (BK // 2, 2)))
            at = byte + tl.arange(0, BK // 2)
            has = inside_n[:, None] & (at < row_bytes)[None, :]
            raw = tl.load(w_p + outputs[:, None] * row_bytes + at[None, :], mask=has, other=0)
            products = numbers_mxfp4(raw & 15) * even[None, :]
            products += numbers_mxfp4(raw >> 4) * odd[None, :]
            sums = tl.sum(tl.reshape(products, (BN, BK // 32, 16)), 2)
            nth = byte // 16 + tl.arange(0, BK // 32)
            has_scale = inside_n[:, None] & (nth < row_bytes // 16)[None, :]
            of = outputs[:, None] * (row_bytes // 16) + nth[None, :]
            total += sums * powers_mxfp4(tl.load(scales_p + of, mask=has_scale, other=0))
        y = tl.sum(total, 1)
        if BIAS:
            y += tl.load(bias_p + outputs, mask=inside_n, other=0.0).to(tl.float32)
        stored, y = width, y[None, :]
        if CLAMPED:
            y = clamped(y, alpha, limit, 1, BN)
            columns, stored = tile * (BN // 2) + tl.arange(0, BN // 2), width // 2
        place = y_p + slot * stored + columns[None, :]
        tl.store(place, y.to(y_p.dtype.element_ty), mask=(columns < stored)[None, :])


@triton.jit
def unpack_groups(codes_p, scales_p, y_p, count, BG: tl.constexpr, PDL: tl.constexpr):
    """Grid (count / BG): numbers of `count` groups of 32."""
    join_chain(PDL)
    groups = tl.program_id(0).to(tl.int64) * BG + tl.arange(0, BG)
    has = (groups < count)[:, None]
    raw = tl.load(codes_p + groups[:, None] * 16 + tl.arange(0, 16)[None, :], mask=has, other=0)
    scales = tl.load(scales_p + groups[:, None], mask=has, other=0)
    numbers = scaled_mxfp4(tl.interleave(raw & 15, raw >> 4), scales, BG, 32)
    place = y_p + groups[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(place, numbers.to(y_p.dtype.element_ty), mask=has)


def is_whole(weight: PackedWeight | torch.Tensor) -> TypeGuard[PackedWeight]:
    """Whether it is MXFP4 whose rows hold whole groups, one after the other."""
    if isinstance(weight, torch.Tensor) or weight.format.name != "mxfp4":
        return False
    in_order = all(weight.tensors[name].is_contiguous() for name in ("weight", "scale"))
    return in_order and weight.in_features % _GROUP == 0


def alone(
    x: torch.Tensor,
    weight: PackedWeight,
    experts: torch.Tensor,
    divisor: int,
    bias: torch.Tensor | None = None,
    clamp: tuple[float, float] | None = None,
) -> torch.Tensor:
    """[slots, N]: row x[slot // divisor] times the weight [E, N, K] of experts[slot], plus its bias
    [E, N]; rows are not written where an expert is below 0. `clamp`: alpha and limit of
    moe_experts_clamped; then [slots, N / 2]."""
    x, width, slots = x.contiguous(), weight.out_features, experts.numel()
    row_bytes = weight.in_features // 2
    y = torch.empty((slots, width // (2 if clamp else 1)), dtype=x.dtype, device=x.device)
    across = cdiv(width, COLUMNS)
    alone_product[(slots * across,)](
        x, weight.tensors["weight"].view(torch.uint8), weight.tensors["scale"],
        x if bias is None else bias, y, experts, width, row_bytes, x.stride(0), across,
        *(clamp or (0.0, 0.0)), BIAS=bias is not None, DIVISOR=divisor, CLAMPED=clamp is not None,
        BN=COLUMNS, BK=DEPTH, **options(num_warps=4, num_stages=1),
    )  # fmt: skip
    return y


def unpacked(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Its numbers [E, N, K], for one call."""
    codes, scales = weight.tensors["weight"].view(torch.uint8), weight.tensors["scale"]
    y = torch.empty((*codes.shape[:-1], weight.in_features), dtype=dtype, device=codes.device)
    count = scales.numel()
    unpack_groups[(cdiv(count, _UNPACKED),)](
        codes, scales, y, count, BG=_UNPACKED, **options(num_warps=4, num_stages=1)
    )
    return y
