"""Tensors of a GGUF file as a model's weights: decoded while they are read, or kept packed.

Tensors are decoded a megabyte at a time, directly to the dtype that the model computes in, so no
second copy of a tensor exists. A quantizer that asked for a matrix's packed numbers and scales gets
those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .blocks import split_q4_0, split_q8_0, to_bfloat16
from .names import Source, sources

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor

    from .reader import GGUFModel, GGUFTensor

_CHUNK_BYTES: Final = 1024 * 1024  # of decoded numbers, which then stay in the processor's cache
_BITS: Final[dict[str, str]] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_SPLIT: Final[dict[str, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]]] = {
    "Q4_0": split_q4_0,
    "Q8_0": split_q8_0,
}


def weights(
    model: GGUFModel,
    config: Mapping[str, Any],
    device: DeviceBackend,
    dtype: str,
    is_wanted: Callable[[str], bool],
) -> Iterator[tuple[str, GGUFWeight]]:
    """Every weight in file order, unread. `dtype`: the dtype that quantized tensors are decoded to.
    `is_wanted`: whether the model has a placement for a packed tensor, by checkpoint name."""
    found = sorted(
        sources(model, dict(config)),
        key=lambda s: (str(s.tensor.file.path), s.tensor.start, s.first_row),
    )
    for source in found:
        scale = f"{source.name}_scale"
        if source.tensor.format.name in _SPLIT and is_wanted(scale):
            yield source.name, PackedWeight(source, device, 0)
            yield scale, PackedWeight(source, device, 1)
        elif source.up is not None:
            yield source.name, UpProjection(source, source.up, device, dtype)
        else:
            yield source.name, GGUFWeight(source, device, dtype)


class GGUFWeight:
    """One weight: contracts.model.StoredTensor. Plain formats keep their dtype."""

    def __init__(self, source: Source, device: DeviceBackend, dtype: str) -> None:
        self._source, self._device = source, device
        self.shape = source.shape
        self.dtype = source.tensor.format.dtype or dtype
        self._bits = np.dtype(_BITS[self.dtype])

    def read(self, *region: slice | int) -> Tensor:
        """The region on the device."""
        xp = self._device.xp
        host = xp.from_numpy(self._read(region), xp.dtype(self.dtype))
        return xp.to_device(host, self._device.device)

    def _read(self, region: tuple[slice | int, ...]) -> np.ndarray:
        """Read rows in chunks; each is decoded and cut to the requested columns."""
        full = [slice(0, 1)] * (2 - len(self.shape)) + [*region]
        full += [slice(None)] * (max(2, len(self.shape)) - len(full))
        cuts = [part for part in full if isinstance(part, slice)]
        if len(full) > 2 or len(cuts) < len(full):
            # Three dimensions: no model has such a tensor, but a file may under a wrong name.
            return self._rows(0, math.prod(self.shape[:-1])).reshape(self.shape)[region]
        rows, columns = cuts
        first, last, _ = rows.indices(math.prod(self.shape[:-1]))
        start, stop, _ = columns.indices(self.shape[-1])
        out = np.empty((last - first, stop - start), self._bits)
        step = max(1, _CHUNK_BYTES // (4 * self.shape[-1]))
        for row in range(first, last, step):
            end = min(row + step, last)
            out[row - first : end - first] = self._rows(row, end)[:, start:stop]
        return out[0] if len(self.shape) == 1 else out

    def _rows(self, start: int, stop: int) -> np.ndarray:
        """Rows in this weight's dtype; bfloat16 as bits."""
        source = self._source
        raw = _raw(source, start, stop)
        if source.tensor.format.dtype:
            found = np.ascontiguousarray(raw).view(self._bits)
        else:
            found = _narrow(_decode(source.tensor, raw), self.dtype)
        is_vector = source.order is not None and len(source.shape) == 1
        return found[:, source.order] if is_vector else found


class PackedWeight(GGUFWeight):
    """One half of a matrix that stays packed: its numbers (0) or the scales of 32 numbers each
    (1)."""

    def __init__(self, source: Source, device: DeviceBackend, half: int) -> None:
        super().__init__(source, device, "float32")
        self._half, self._split = half, _SPLIT[source.tensor.format.name]
        one = self._rows(0, 1)
        self.shape = (source.shape[0], one.shape[1])
        self.dtype, self._bits = str(one.dtype), one.dtype

    def _rows(self, start: int, stop: int) -> np.ndarray:
        return self._split(_raw(self._source, start, stop))[self._half]


class UpProjection(GGUFWeight):
    """Keys then values of every head [heads * (a + b), rank], made from [heads, rank, a] and
    [heads, b, rank]."""

    def __init__(self, source: Source, up: GGUFTensor, device: DeviceBackend, dtype: str) -> None:
        super().__init__(source, device, dtype)
        self.dtype, self._up = dtype, up
        self._bits = np.dtype(_BITS[dtype])

    def _rows(self, start: int, stop: int) -> np.ndarray:
        key, value = self._source.tensor, self._up
        _, rank, a = key.shape
        b = value.shape[1]
        first, last = start // (a + b), -(-stop // (a + b))
        heads = []
        for head in range(first, last):
            keys = _decode(key, key.rows(head * rank, (head + 1) * rank)).T
            heads += [keys, _decode(value, value.rows(head * b, (head + 1) * b))]
        offset = first * (a + b)
        return _narrow(np.concatenate(heads)[start - offset : stop - offset], self.dtype)


def _raw(source: Source, start: int, stop: int) -> np.ndarray:
    if source.order is None or len(source.shape) == 1:
        return source.tensor.rows(source.first_row + start, source.first_row + stop)
    whole = source.tensor.rows(0, source.tensor.num_rows)
    return np.take(whole, source.order[start:stop], axis=0)


def _decode(tensor: GGUFTensor, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # a damaged scale may be infinite; layers check their scales
        return tensor.format.decode(raw)


def _narrow(wide: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return to_bfloat16(wide)
    with np.errstate(over="ignore"):
        return wide.astype(_BITS[dtype])
