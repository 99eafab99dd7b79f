"""Writes a quantized KV cache and reads its rows: any device, plain tensor code. The definition of
contracts/kv_formats.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.kv_formats import KV_FORMATS, KVFormat
from fastdeploy_core.contracts.quant_formats import pack_int4, unpack_int4
from fastdeploy_core.tensor import namespace

from .cache import kv_write

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import KVScales
    from fastdeploy_core.tensor import Tensor

Rows = tuple["Tensor", ...]
# Scales are float16: the smallest that does not vanish, and the largest.
_LEAST, _MOST = 1e-7, 65504.0


def kv_write_int8(rows: Rows, cache: Rows, slot_mapping: Tensor, scales: KVScales | None) -> None:
    """Format int8; see _write."""
    _write(KV_FORMATS["int8"], rows, cache, slot_mapping, scales)


def kv_write_float8_e4m3fn(
    rows: Rows, cache: Rows, slot_mapping: Tensor, scales: KVScales | None
) -> None:
    """Format float8_e4m3fn; see _write."""
    _write(KV_FORMATS["float8_e4m3fn"], rows, cache, slot_mapping, scales)


def kv_write_int4_zp(
    rows: Rows, cache: Rows, slot_mapping: Tensor, scales: KVScales | None
) -> None:
    """Format int4_zp; see _write."""
    _write(KV_FORMATS["int4_zp"], rows, cache, slot_mapping, scales)


def _write(
    kind: KVFormat, rows: Rows, cache: Rows, slot_mapping: Tensor, scales: KVScales | None
) -> None:
    """Round each token's rows [T, heads, dim] and store them in their slots, in place.

    cache: quantized numbers for each of rows, followed by as many tensors of dynamic scales unless
    static `scales` are given. Slot -1 is not stored.
    """
    if slot_mapping.shape[0] == 0:
        return
    if scales is None:
        pairs = [_quantize_rows(row, kind) for row in rows]
        data = tuple(numbers for numbers, _ in pairs) + tuple(scale for _, scale in pairs)
    else:
        minimum = scales.minimum or (None,) * len(rows)
        data = tuple(
            _round_rows(row, kind, scale, low)
            for row, scale, low in zip(rows, scales.scale, minimum, strict=True)
        )
    kv_write(data, cache, slot_mapping)


class QuantizedRows:
    """A pool of quantized rows, one for each (slot, head), read by row numbers."""

    def __init__(
        self,
        kind: KVFormat,
        heads: int,
        dim: int,
        numbers: Tensor,
        scales: Tensor | None,
        tables: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        """`scales`: pool of dynamic scales; `tables`: static scales and minimums, [heads, dim]."""
        self._kind, self._heads, self._dim = kind, heads, dim
        self._numbers = numbers.view([-1, kind.width(dim)])
        self._scales = None if scales is None else scales.view([-1, kind.scale_width])
        self._tables = tables

    def take(self, rows: Tensor) -> Tensor:
        """[n, dim] float32: the rows with these numbers [n]."""
        xp = namespace(rows)
        numbers = xp.index_select(self._numbers, 0, rows)
        low: Tensor | None
        if self._tables is not None:
            head = rows % self._heads
            scale = xp.index_select(self._tables[0], 0, head)
            low = self._tables[1]
            low = None if low is None else xp.index_select(low, 0, head)
        else:
            wide = xp.index_select(self._scales, 0, rows).float()
            scale = wide[:, 0:1]
            low = wide[:, 1:2] if self._kind.has_minimum else None
        return _restore_rows(numbers, self._kind, self._dim, scale, low)


def _dynamic_scales(rows: Tensor, kind: KVFormat) -> Tensor:
    """Scales of rows [T, h, d]: [T, h, kind.scale_width], as they are stored."""
    xp = namespace(rows)
    wide, dtype = rows.float(), xp.dtype(kind.scale_dtype)
    if not kind.has_minimum:
        scale = wide.abs().amax(dim=-1, keepdim=True) / kind.bound
        return scale.clamp(_LEAST, _MOST).to(dtype)
    low = (-((-wide).amax(dim=-1, keepdim=True))).clamp(-_MOST, _MOST)
    scale = ((wide.amax(dim=-1, keepdim=True) - low) / kind.bound).clamp(_LEAST, _MOST)
    return xp.cat((scale, low), -1).to(dtype)


def _round_rows(
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


def _quantize_rows(rows: Tensor, kind: KVFormat) -> tuple[Tensor, Tensor]:
    """(numbers, dynamic scales) of rows [T, h, d]."""
    scales = _dynamic_scales(rows, kind)
    wide = scales.float()
    minimum = wide[..., 1:2] if kind.has_minimum else None
    return _round_rows(rows, kind, wide[..., 0:1], minimum), scales


def _restore_rows(
    numbers: Tensor, kind: KVFormat, dim: int, scale: Tensor, minimum: Tensor | None = None
) -> Tensor:
    """Float32 [..., dim] from numbers; scale and minimum broadcast to it."""
    wide = unpack_int4(numbers, dim).float() if kind.per_byte == 2 else numbers.float()
    wide = wide * scale
    return wide if minimum is None else wide + minimum
