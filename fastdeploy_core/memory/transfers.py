"""Small copies between host and device that nobody waits for.

Uploads are packed: whatever a step has to tell the device goes in one copy. Downloads are started
when a step is launched and read when its event has happened."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from operator import is_
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend, DeviceEvent
    from fastdeploy_core.tensor import Tensor

# Waiting polls: a blocking wait would hold the interpreter lock on some drivers. A step may take
# less than half a millisecond, so a poll must not come a tenth of that late.
POLL_S = 0.00002
PR_SET_TIMERSLACK = 29  # Linux; other systems keep their timers
# Host buffers of uploads that may be on their way at once; a step after a prompt makes several.
NUM_SOURCES = 8
# Every part of a packed copy begins at a multiple of this.
ALIGNMENT = 16


_this_thread = threading.local()


def wait_for(event: DeviceEvent | None) -> None:
    """Return when the event has happened."""
    if event is None or event.query():
        return
    _sleep_precisely()
    while not event.query():
        time.sleep(POLL_S)


def _sleep_precisely() -> None:
    """Let this thread's timers fire on time: Linux gives them 50 microseconds more by default."""
    if getattr(_this_thread, "is_precise", False):
        return
    _this_thread.is_precise = True
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


class Uploads:
    """Packs int64 arrays into one copy to the device.

    The tensors of one `send` are overwritten by the next one, which the device does after all work
    queued in between.
    """

    def __init__(self, device: DeviceBackend) -> None:
        self._device, self._xp = device, device.xp
        self._capacity = 0
        self._target: Tensor = None
        self._numbers: Tensor = None  # the same memory, as int64
        self._free: deque[tuple[np.ndarray, DeviceEvent | None]] = deque()

    def send(self, *arrays: np.ndarray) -> list[Tensor]:
        """The arrays on the device, one after the other, one-dimensional."""
        total = sum(array.size for array in arrays)
        if total > self._capacity:
            self._grow(total)
        source, event = self._free.popleft()
        wait_for(event)  # long past: several steps lie in between
        numbers, tensors, first = source.view(np.int64), [], 0
        for array in arrays:
            last = first + array.size
            numbers[first:last] = array.reshape(-1)
            tensors.append(self._numbers[first:last])
            first = last
        self._device.upload(source[: total * 8], self._target[: total * 8])
        self._free.append((source, self._device.record_event()))
        return tensors

    def _grow(self, total: int) -> None:
        xp, device = self._xp, self._device
        self._capacity = max(1024, 2 * total)
        self._target = xp.zeros((self._capacity * 8,), dtype=xp.uint8, device=device.device)
        self._numbers = self._target.view(xp.int64)
        self._free = deque(
            (device.host_buffer(self._capacity * 8), None) for _ in range(NUM_SOURCES)
        )


class Downloads:
    """Host memory for results on their way; taken when a step is launched, given back when read."""

    def __init__(self, device: DeviceBackend) -> None:
        self._device, self._xp = device, device.xp
        self._free: list[np.ndarray] = []
        # Then results are here already when a step was launched, and nothing is on its way.
        self._is_host = device.limits.shares_host_memory and not device.limits.overlap
        # Captured graphs leave their results in the same tensors again and again.
        self._tensors: list[Tensor] = []
        self._places: list[tuple[slice, str, tuple[int, ...]]] = []
        self._total = 0

    def start(self, tensors: list[Tensor]) -> Download:
        """Queue copies of all of them."""
        if self._is_host:
            return Download([self._device.to_host(x).copy() for x in tensors])
        if len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)):
            self._arrange(tensors)
        memory, arrays = self._take(self._total), []
        for x, (place, dtype, shape) in zip(tensors, self._places, strict=True):
            part = memory[place]
            if part.size:
                self._device.download(x, part)
            arrays.append(part.view(dtype).reshape(shape))
        return Download(arrays, memory, self._free)

    def _arrange(self, tensors: list[Tensor]) -> None:
        xp, first = self._xp, 0
        self._tensors, self._places = list(tensors), []
        for x in tensors:
            size = xp.nbytes(x)
            place = slice(first, first + size)
            self._places.append((place, xp.dtype_name(x), tuple(x.shape)))
            first += -(-size // ALIGNMENT) * ALIGNMENT
        self._total = first

    def _take(self, num_bytes: int) -> np.ndarray:
        for index, memory in enumerate(self._free):
            if memory.size >= num_bytes:
                return self._free.pop(index)
        self._free.clear()  # too small by now
        return self._device.host_buffer(max(4096, 2 * num_bytes))


class Download:
    """Values that arrive when an event recorded after `Downloads.start` has happened."""

    def __init__(
        self,
        arrays: list[np.ndarray],
        memory: np.ndarray | None = None,
        home: list[np.ndarray] | None = None,
    ) -> None:
        """memory: what the arrays lie in; home: where it goes afterwards."""
        self.arrays = arrays
        self._memory, self._home = memory, home

    def release(self) -> None:
        """The arrays have been read; their memory serves another step."""
        self.arrays = []
        if self._memory is not None and self._home is not None:
            self._home.append(self._memory)
