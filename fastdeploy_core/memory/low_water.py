"""What steps take of a device's memory, seen while they run."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fastdeploy_core.contracts.device import MemoryInfo

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend

_RESIDENT: Final = Path("/proc/self/statm")
_VAST: Final = 1 << 60
POLL_S = 0.002


def probe(device: DeviceBackend) -> Callable[[], MemoryInfo]:
    """How to see what a step takes. Of memory that is the host's, what this process holds counts:
    other programs come and go meanwhile."""
    if not (device.limits.shares_host_memory and _RESIDENT.exists()):
        return device.memory
    give_back_freed()  # or it would be used again unseen
    return _own_memory


def give_back_freed() -> None:
    """The allocator returns to the system what it keeps of freed memory, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _own_memory() -> MemoryInfo:
    """As if this process were alone on a machine of that size; files that it maps do not count."""
    _, resident, files, *_ = map(int, _RESIDENT.read_text().split())
    used = (resident - files) * mmap.PAGESIZE
    return MemoryInfo(total_bytes=_VAST, free_bytes=_VAST - used)


class LowWater:
    """The least free memory seen while the block runs; a thread asks the driver."""

    def __init__(self, memory: Callable[[], MemoryInfo]) -> None:
        self._memory = memory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-profile", daemon=True)
        self.free_bytes = memory().free_bytes

    def __enter__(self) -> LowWater:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        self.free_bytes = min(self.free_bytes, self._memory().free_bytes)
