"""Numbers of MXFP4 in Triton, and all of a weight's unpacked for a call: for very many rows, for
which quant_any.py's product of tiles would unpack the same weights again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeGuard

import torch
import triton
import triton.language as tl

from .common import cdiv, join_chain, options

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight

_GROUP: Final = 32
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


def unpacked(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Its numbers [E, N, K], for one call."""
    codes, scales = weight.tensors["weight"].view(torch.uint8), weight.tensors["scale"]
    y = torch.empty((*codes.shape[:-1], weight.in_features), dtype=dtype, device=codes.device)
    count = scales.numel()
    unpack_groups[(cdiv(count, _UNPACKED),)](
        codes, scales, y, count, BG=_UNPACKED, **options(num_warps=4, num_stages=1)
    )
    return y
