"""Reads checkpoint tensors before they are used, several at once, through page-locked memory.

One thread that copies from a mapped file reaches a fraction of the speed of a disk cache or of a
device's link. Used for devices whose copies are asynchronous. A tensor without a known placement is
read when it is asked for.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend, DeviceEvent
    from fastdeploy_core.layers.weight_map import WeightMap
    from fastdeploy_core.tensor import Tensor

    from .weights import SafetensorsTensor

Region = tuple[slice | int, ...]

_NUM_THREADS: Final = min(16, os.cpu_count() or 1)
_BUFFER_BYTES: Final = 8 << 20  # each thread has two
_MOST_AHEAD_BYTES: Final = 1 << 30
_NAP_S: Final = 20e-6


class _Staging:
    """One thread's page-locked memory: one half is filled while the other one is copied."""

    def __init__(self, device: DeviceBackend) -> None:
        self._device = device
        whole = device.host_buffer(2 * _BUFFER_BYTES)
        self._halves = (whole[:_BUFFER_BYTES], whole[_BUFFER_BYTES:])
        self._copied: list[DeviceEvent | None] = [None, None]
        self._next = 0

    def copy(self, stored: SafetensorsTensor, region: Region, target: Tensor) -> None:
        """Queue the copy of a region of rows to a contiguous uint8 tensor of its bytes."""
        part = stored.bits()[region]
        row_bytes = part[0].nbytes
        step = _BUFFER_BYTES // row_bytes
        for start in range(0, len(part), step):
            num_bytes = min(step, len(part) - start) * row_bytes
            self._await(self._next)
            bits = self._halves[self._next][:num_bytes]
            stored.fill(region, start, bits)
            first = start * row_bytes
            self._device.upload(bits, target[first : first + num_bytes])
            self._copied[self._next] = self._device.record_event()
            self._next = 1 - self._next

    def _await(self, number: int) -> None:
        event = self._copied[number]
        while event is not None and not event.query():
            time.sleep(_NAP_S)


class _Read:
    """A stored tensor of which one region is being read."""

    def __init__(self, stored: SafetensorsTensor, region: Region, found: Future[Tensor]) -> None:
        self._stored, self._region, self._found = stored, region, found
        self.shape, self.dtype, self.nbytes = stored.shape, stored.dtype, stored.nbytes

    def bits(self) -> np.ndarray:
        """The whole tensor's bits on the host."""
        return self._stored.bits()

    def read(self, *region: slice | int) -> Tensor:
        """The region on the device, in the stored dtype."""
        if region == self._region:
            return self._found.result()
        return self._stored.read(*region)


class ReadAhead:
    """Wraps the tensors of a checkpoint on their way to the placements of one model."""

    def __init__(self, device: DeviceBackend, weights: WeightMap) -> None:
        self._device, self._weights = device, weights
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "fd-weights")

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def over(
        self, tensors: Iterable[tuple[str, SafetensorsTensor]]
    ) -> Iterator[tuple[str, SafetensorsTensor | _Read]]:
        """The same tensors in the same order; regions that placements want are read ahead."""
        waiting: deque[tuple[str, SafetensorsTensor | _Read]] = deque()
        ahead = 0
        for name, stored in tensors:
            region = self._region(name, stored)
            if region is None:
                waiting.append((name, stored))
            else:
                found = self._pool.submit(self._read, stored, region)
                waiting.append((name, _Read(stored, region, found)))
            ahead += stored.nbytes
            while ahead > _MOST_AHEAD_BYTES:
                ahead -= waiting[0][1].nbytes
                yield waiting.popleft()
        yield from waiting

    def _region(self, name: str, stored: SafetensorsTensor) -> Region | None:
        """The region to read of a tensor, if it is known and large enough."""
        placement = self._weights.placements.get(self._weights.canonical(name))
        if placement is None or placement.is_held or len(stored.shape) < 2:
            return None
        is_swapped = self._weights.swap_linear and placement.is_linear
        region: Region = placement.region
        if is_swapped:
            region = (*region[:-2], region[-1], region[-2])
        part = stored.bits()[region]
        is_small = not len(part) or part[0].nbytes > _BUFFER_BYTES
        return None if is_small else region

    def _read(self, stored: SafetensorsTensor, region: Region) -> Tensor:
        """Read a region; runs in a thread of the pool."""
        staging = getattr(self._own, "staging", None)
        if staging is None:
            staging = self._own.staging = _Staging(self._device)
        part, xp = stored.bits()[region], self._device.xp
        result = xp.empty(
            list(part.shape), dtype=xp.dtype(stored.dtype), device=self._device.device
        )
        staging.copy(stored, region, result.view(-1).view(xp.uint8))
        return result
