"""Memory that is given back while its addresses stay, so that whatever holds one goes on after:
tensors, kernels' arguments, captured graphs.

Memory of the host: its pages are dropped, and come back as zeros when they are used again. A GPU of
NVIDIA under torch: see cuda_memory. Other devices have no such memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from fastdeploy_core.errors import ConfigError

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend

_MADV_DONTNEED: Final = 4
_STATM: Final = Path("/proc/self/statm")


class SleepingMemory(Protocol):
    """Memory of one rank in regions: "weights" and "kv_cache"."""

    def region(self, tag: str) -> AbstractContextManager[None]:
        """What is allocated inside belongs to the region."""
        ...

    def sleep(self, tag: str, tensors: Sequence[Any], *, is_lost: bool) -> None:
        """Give the region's memory back. `tensors`: those of it that somebody fills anew if
        `is_lost`; everything else, and they without it, is the same after `wake`."""
        ...

    def sleeps(self, tag: str) -> bool:
        """Whether the region has no memory."""
        ...

    def wake(self, tag: str) -> None:
        """Take memory for the region again. MemoryError: there is none; the region sleeps on."""
        ...

    def free_bytes(self) -> int:
        """Free memory of the device; of the host, less what this process holds."""
        ...

    def give_back(self) -> None:
        """Memory of tensors that were dropped becomes free for others."""
        ...

    def close(self) -> None:
        """Nothing of it is used any more."""
        ...


def memory_of(device: DeviceBackend) -> SleepingMemory:
    """The kind that the device has."""
    if device.limits.shares_host_memory:
        return HostMemory(device)
    if device.xp.name == "torch" and str(device.device).startswith("cuda"):
        from .cuda_memory import CudaMemory, is_possible

        if is_possible():
            return CudaMemory(device)
    return NoMemory(device)


class HostMemory:
    """The host's own. At level 1 weights stay where they are: they are in host memory."""

    def __init__(self, device: DeviceBackend) -> None:
        self._xp = device.xp
        self._asleep: set[str] = set()
        self._libc = ctypes.CDLL(None, use_errno=True)

    def region(self, tag: str) -> AbstractContextManager[None]:
        """Any memory will do."""
        return nullcontext()

    def sleep(self, tag: str, tensors: Sequence[Any], *, is_lost: bool) -> None:
        """See SleepingMemory."""
        self._asleep.add(tag)
        for tensor in tensors if is_lost else ():
            start, size = tensor.data_ptr(), self._xp.nbytes(tensor)
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
            if tensor.is_contiguous() and length > 0:
                address = ctypes.c_void_p(first)
                self._libc.madvise(address, ctypes.c_size_t(length), _MADV_DONTNEED)

    def sleeps(self, tag: str) -> bool:
        """See SleepingMemory."""
        return tag in self._asleep

    def wake(self, tag: str) -> None:
        """The pages come back by themselves."""
        self._asleep.discard(tag)

    def free_bytes(self) -> int:
        """Minus what this process holds."""
        with contextlib.suppress(OSError, ValueError):
            _, resident, files, *_ = map(int, _STATM.read_text("ascii").split())
            return (files - resident) * mmap.PAGESIZE
        return 0

    def give_back(self) -> None:
        """See SleepingMemory."""
        gc.collect()

    def close(self) -> None:
        """There is nothing to close."""


class NoMemory:
    """A device whose memory cannot be given back at the same addresses: it can be paused, and its
    weights can be replaced where there is room for them twice."""

    def __init__(self, device: DeviceBackend) -> None:
        self._device = device

    def region(self, tag: str) -> AbstractContextManager[None]:
        """See SleepingMemory."""
        return nullcontext()

    def sleep(self, tag: str, tensors: Sequence[Any], *, is_lost: bool) -> None:
        """ConfigError."""
        device = self._device
        raise ConfigError(
            f"device {device.name} on {device.xp.name} cannot give memory back and keep its "
            "addresses; possible: pause (sleep at level 0), cpu, and cuda on torch"
        )

    def sleeps(self, tag: str) -> bool:
        """It lends nothing either."""
        return True

    def wake(self, tag: str) -> None:
        """It never slept."""

    def free_bytes(self) -> int:
        """The driver's figure."""
        return self._device.memory().free_bytes

    def give_back(self) -> None:
        """See SleepingMemory."""
        gc.collect()

    def close(self) -> None:
        """There is nothing to close."""
