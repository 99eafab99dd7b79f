"""Decode steps that run one behind the other without the host, each fed what the one before drew.

The first of them is a recorded step like any other; what follows replays the same recordings. Every draw
leaves its results in memory that holds those of the last few steps, which the host reads once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.contracts.device import RepeatingDevice

from .drawing import has_processors

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.device import CapturedGraph, DeviceBackend, DeviceLimits
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

    from .pending import Launched
    from .step_rows import StepRows


def max_decodes(config: EngineConfig, limits: DeviceLimits) -> int:
    """WorkerInfo.max_decodes, where one rank has recorded steps of any size and their draws."""
    draws_alone = config.speculative is None and not has_processors(config)
    overlaps = limits.overlap and config.batch.overlap
    return limits.decodes_per_step if draws_alone and not overlaps else 1


class MultiStep:
    """Up to `most` decode steps of up to `max_rows` rows."""

    def __init__(
        self, device: DeviceBackend, kernels: KernelTable, max_rows: int, most: int
    ) -> None:
        self._device, self._keep = device, kernels["keep_results"]
        xp = device.xp
        self._kept = xp.zeros((max_rows, most), dtype=xp.int64, device=device.device)

    def keep(self, slots: Tensor, results: Tensor, num_computed: Tensor) -> None:
        """What is recorded behind each draw; see kernel keep_results."""
        self._keep(slots, results, num_computed, self._kept[: slots.shape[0]])

    def go_on(self, graphs: tuple[CapturedGraph, ...], launched: Launched) -> Tensor:
        """Queue the rest of the rows' steps: results of all of them, for `in_order`."""
        rows, device, began = launched.rows, self._device, time.perf_counter()
        times = rows.num_decodes - 1
        if isinstance(device, RepeatingDevice):
            device.replay_times(graphs, times)
        else:
            for graph in graphs * times:
                graph.replay()
        launched.model_s += time.perf_counter() - began
        return self._kept[: rows.slots.size]


def in_order(kept: np.ndarray, rows: StepRows) -> np.ndarray:
    """[B, num_decodes] marked tokens of each row, out of what `go_on` gave."""
    nth = rows.starts[:, None] + np.arange(1, 1 + rows.num_decodes)
    found: np.ndarray = np.take_along_axis(kept, nth % kept.shape[1], 1)
    return found
