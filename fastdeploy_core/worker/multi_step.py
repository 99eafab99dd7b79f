"""Decode steps that run one behind the other without the host, each fed what the one before drew.

The first of them is a recorded step like any other; what follows replays the same recordings
(RecordedStep.repeat). Where no results are posted (posting.py) every draw leaves its results in memory that
holds those of the last few steps, which the host reads once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.contracts.device import PostingDevice

from .drawing import has_processors

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

    from .step_rows import StepRows


def max_decodes(config: EngineConfig, device: DeviceBackend) -> int:
    """WorkerInfo.max_decodes, where one rank has recorded steps of any size and their draws."""
    limits = device.limits
    overlaps = limits.overlap and config.batch.overlap
    # Kept results are those of one step, of which the host reads all before it plans the next one.
    keeps_up = isinstance(device, PostingDevice) or not overlaps
    return limits.decodes_per_step if keeps_up and not has_processors(config) else 1


class KeptResults:
    """Of up to `most` decode steps of up to `max_rows` rows."""

    def __init__(
        self, device: DeviceBackend, kernels: KernelTable, max_rows: int, most: int
    ) -> None:
        self._keep = kernels["keep_results"]
        xp = device.xp
        self._kept = xp.zeros((max_rows, most), dtype=xp.int64, device=device.device)

    def keep(self, slots: Tensor, results: Tensor, num_computed: Tensor) -> None:
        """What is recorded behind each draw; see kernel keep_results."""
        self._keep(slots, results, num_computed, self._kept[: slots.shape[0]])

    def of(self, num_rows: int) -> Tensor:
        """Those of the first rows, for `in_order`."""
        return self._kept[:num_rows]


def in_order(kept: np.ndarray, rows: StepRows) -> np.ndarray:
    """[B, num_decodes] marked tokens of each row, out of KeptResults."""
    nth = rows.starts[:, None] + np.arange(1, 1 + rows.num_decodes)
    found: np.ndarray = np.take_along_axis(kept, nth % kept.shape[1], 1)
    return found
