"""How much memory the KV pool may take."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from fastdeploy_core.contracts.device import MemoryInfo

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend

_RESIDENT: Final = Path("/proc/self/statm")
_VAST: Final = 1 << 60
GIB, MIB = 2**30, 2**20
POLL_S = 0.002
# Where the pool and everything else share the host's memory, half of what is free stays free.
SHARED_FRACTION = 0.5


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        self.free_bytes = min(self.free_bytes, self._memory().free_bytes)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of one rank. `step_bytes`: what a step of maximal size needs beside weights and cache;
    `graph_bytes`: what recorded steps hold."""

    total_bytes: int
    free_bytes: int  # with the weights loaded, between steps
    weight_bytes: int
    step_bytes: int
    utilization: float
    is_bound: bool = False  # step_bytes is an upper bound, not a measurement
    shared_with: int = 0  # ranks that share this memory with the whole host; 0: device memory
    graph_bytes: int = 0
    most_bytes: int = 0  # all that the batch could ever hold; what is shared gives no more

    @property
    def available_bytes(self) -> int:
        """What is left for the KV pool; may be negative."""
        used = self.total_bytes - self.free_bytes
        left = int(self.total_bytes * self.utilization) - used - self.step_bytes - self.graph_bytes
        if self.shared_with:
            left = min(left, int(self.free_bytes * SHARED_FRACTION)) // self.shared_with
            left = min(left, self.most_bytes)
        return left

    def arithmetic(self) -> str:
        """For messages: where the bytes go."""
        used = self.total_bytes - self.free_bytes
        text = (
            f"{self.total_bytes / GIB:.2f} GiB x {self.utilization:g} usable"
            f" - {used / GIB:.2f} GiB in use (weights {_size(self.weight_bytes)})"
            f" - {self.step_bytes / GIB:.2f} GiB{' at most' * self.is_bound} for the largest step"
        )
        if self.graph_bytes:
            text += f" - {self.graph_bytes / GIB:.2f} GiB for captured decode steps"
        if self.shared_with:
            text += (
                f", at most {SHARED_FRACTION:g} of {self.free_bytes / GIB:.2f} GiB free host memory"
                f" for {self.shared_with} rank(s), and {self.most_bytes / GIB:.2f} GiB hold a full"
                " batch"
            )
        return f"{text} = {self.available_bytes / GIB:.2f} GiB for the KV cache"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
