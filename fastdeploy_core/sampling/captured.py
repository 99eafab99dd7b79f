"""Sampling at random as part of a captured graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import columns as bits
from .columns import SamplingColumns

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

# What rows may need so that their sampling can be captured.
CAPTURED = bits.RANDOM | bits.TEMPERATURE | bits.FILTER | bits.PROMPT_LOGPROBS
FLOATS = ("temperature", "top_p", "min_p")


class CapturedSampling:
    """Sampling at random in a captured graph: parameters of up to `max_rows` rows in fixed memory,
    in batch order. The same tokens as Sampler.sample gives for rows without constraints: of
    filtered logits, with the random numbers of the place."""

    def __init__(
        self, device: DeviceBackend, kernels: KernelTable, columns: SamplingColumns, max_rows: int
    ) -> None:
        xp = self._xp = device.xp
        self._device, self._columns = device, columns
        self._draw = kernels["draw"]
        self._numbers = xp.zeros((3, max_rows), dtype=xp.int64, device=device.device)
        self._floats = xp.zeros((3, max_rows), dtype=xp.float32, device=device.device) + 1
        self._filled = (np.empty(0, dtype=np.int64), -1)  # slots; version of the columns

    def fill(self, slots: np.ndarray) -> None:
        """These are the rows; nothing happens while they stay what they are."""
        columns, (filled, version) = self._columns, self._filled
        if version == columns.version and (filled is slots or np.array_equal(filled, slots)):
            return
        self._filled = (slots, columns.version)
        is_random = (columns.flags[slots] & bits.RANDOM) != 0
        numbers = np.stack((is_random.astype(np.int64), columns.top_k[slots], columns.seed[slots]))
        floats = np.stack([getattr(columns, name)[slots] for name in FLOATS])
        floats[:, ~is_random] = 1.0  # their random tokens are not used
        self._numbers[:, : slots.size] = self._device.to_device(numbers)
        self._floats[:, : slots.size] = self._device.to_device(floats)

    def sample(
        self, logits: Tensor, positions: Tensor, width: int = 1, *, filters: bool = True
    ) -> tuple[Tensor, Tensor]:
        """See kernel draw: int64 tokens after these positions, `width` of each row, and peaks;
        consumes the logits. Without `filters` top_k, top_p and min_p are ones that keep
        everything."""
        size = int(logits.shape[0])
        numbers, floats = self._numbers[:, : size // width], self._floats[:, : size // width]
        if width > 1:
            numbers, floats = (
                x.unsqueeze(2).expand([3, size // width, width]).reshape([3, size])
                for x in (numbers, floats)
            )
        rows = (numbers[0], numbers[1], numbers[2], floats[0], floats[1], floats[2])
        ids, peaks = self._draw(logits, *rows, positions, filters)
        return ids, peaks
