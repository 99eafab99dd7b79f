"""Quantizes rows of the KV cache and restores them: the definition of contracts/kv_formats.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.quant_formats import pack_int4, unpack_int4
from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.contracts.kv_formats import KVFormat
    from fastdeploy_core.tensor import Tensor

# Scales are float16: the smallest that does not vanish, and the largest.
_LEAST, _MOST = 1e-7, 65504.0


def dynamic_scales(rows: Tensor, kind: KVFormat) -> Tensor:
    """Scales of rows [T, h, d]: [T, h, kind.scale_width], as they are stored."""
    xp = namespace(rows)
    wide, dtype = rows.float(), xp.dtype(kind.scale_dtype)
    if not kind.has_minimum:
        scale = wide.abs().amax(dim=-1, keepdim=True) / kind.bound
        return scale.clamp(_LEAST, _MOST).to(dtype)
    low = (-((-wide).amax(dim=-1, keepdim=True))).clamp(-_MOST, _MOST)
    scale = ((wide.amax(dim=-1, keepdim=True) - low) / kind.bound).clamp(_LEAST, _MOST)
    return xp.cat((scale, low), -1).to(dtype)


def round_rows(
    rows: Tensor, kind: KVFormat, scale: Tensor, minimum: Tensor | None = None
) -> Tensor:
    """Numbers [T, h, kind.width(d)] of rows [T, h, d]; scale and minimum broadcast to them."""
    xp = namespace(rows)
    shifted = rows.float() if minimum is None else rows.float() - minimum
    numbers = shifted / scale
    if kind.dtype == "float8_e4m3fn":
        return numbers.clamp(-kind.bound, kind.bound).to(xp.float8_e4m3fn)
    low = 0.0 if kind.has_minimum else -kind.bound
    rounded = numbers.round().clamp(low, kind.bound).to(xp.dtype(kind.dtype))
    return pack_int4(rounded) if kind.per_byte == 2 else rounded


def quantize_rows(rows: Tensor, kind: KVFormat) -> tuple[Tensor, Tensor]:
    """(numbers, dynamic scales) of rows [T, h, d]."""
    scales = dynamic_scales(rows, kind)
    wide = scales.float()
    minimum = wide[..., 1:2] if kind.has_minimum else None
    return round_rows(rows, kind, wide[..., 0:1], minimum), scales


def restore_rows(
    numbers: Tensor, kind: KVFormat, dim: int, scale: Tensor, minimum: Tensor | None = None
) -> Tensor:
    """Float32 [..., dim] from numbers; scale and minimum broadcast to it."""
    wide = unpack_int4(numbers, dim).float() if kind.per_byte == 2 else numbers.float()
    wide = wide * scale
    return wide if minimum is None else wide + minimum
