"""Writes a quantized KV cache and reads its rows: any device, plain tensor code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.contracts.kv_formats import KV_FORMATS, KVFormat
from fastdeploy_core.quantization.kv import quantize_rows, restore_rows, round_rows
from fastdeploy_core.tensor import namespace

from .cache import kv_write

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import KVScales
    from fastdeploy_core.tensor import Tensor

Rows = tuple["Tensor", ...]


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
        pairs = [quantize_rows(row, kind) for row in rows]
        data = tuple(numbers for numbers, _ in pairs) + tuple(scale for _, scale in pairs)
    else:
        minimum = scales.minimum or (None,) * len(rows)
        data = tuple(
            round_rows(row, kind, scale, low)
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
        """`scales`: the pool of dynamic scales; `tables`: static scales and minimums, [heads,
        dim]."""
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
        return restore_rows(numbers, self._kind, self._dim, scale, low)
