"""Memory of an NVIDIA GPU behind addresses that stay: CUDA's virtual memory management, under
torch's allocator.

A region is a torch.cuda.MemPool whose segments this module makes: a range of addresses is reserved,
physical memory is created and mapped there. Sleeping unmaps and releases it, waking maps new memory
at the same addresses. What has to be the same afterwards waits in page-locked host memory.
 (CUDA driver API, "Virtual Memory Management".)
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from fastdeploy_core.errors import WorkerError

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend

logger = logging.getLogger(__name__)

_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
# Called by torch's allocator until the process ends, so they outlive every engine.
_FOR_EVER: list[Any] = []


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@dataclass(slots=True)
class _Segment:
    """Addresses that torch has, and the physical memory there; handle None: it sleeps."""

    address: int
    num_bytes: int
    handle: int | None
    saved: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # by offset


def is_possible() -> bool:
    """Whether this torch is built for CUDA, and the driver can be called."""
    if torch.version.cuda is None:
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class _Driver:
    """The calls of the CUDA driver that this needs, for one GPU."""

    def __init__(self, index: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        location = _Location(_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        unit = ctypes.c_size_t()
        self.call("cuMemGetAllocationGranularity", ctypes.byref(unit), self._properties_ref(), 0)
        self.unit = unit.value

    def _properties_ref(self) -> Any:
        return ctypes.byref(self._properties)

    def call(self, name: str, *arguments: Any) -> None:
        """MemoryError where there is no memory, RuntimeError for all else."""
        status = getattr(self._cuda, name)(*arguments)
        if status == 2:  # CUDA_ERROR_OUT_OF_MEMORY
            raise MemoryError(f"{name}: the GPU has no memory left")
        if status:
            raise RuntimeError(f"{name} failed with CUDA error {status}")

    def reserve(self, num_bytes: int) -> int:
        """Addresses without memory."""
        address = ctypes.c_uint64()
        none = ctypes.c_uint64(0)
        size = ctypes.c_size_t(num_bytes)
        self.call(
            "cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), none, none
        )
        return address.value

    def map(self, address: int, num_bytes: int) -> int:
        """Memory at reserved addresses; returns its handle."""
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
        at, zero = ctypes.c_uint64(address), ctypes.c_uint64(0)
        self.call("cuMemCreate", ctypes.byref(handle), size, self._properties_ref(), zero)
        try:
            self.call("cuMemMap", at, size, ctypes.c_size_t(0), handle, zero)
            one = ctypes.c_size_t(1)
            self.call("cuMemSetAccess", at, size, ctypes.byref(self._access), one)
        except BaseException:
            self._cuda.cuMemRelease(handle)
            raise
        return handle.value

    def unmap(self, address: int, num_bytes: int, handle: int) -> None:
        """Give the memory back; the addresses stay reserved."""
        self.call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))
        self.call("cuMemRelease", ctypes.c_uint64(handle))

    def unreserve(self, address: int, num_bytes: int) -> None:
        """Let addresses go."""
        self.call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def save(self, address: int, num_bytes: int) -> torch.Tensor:
        """The content of memory, on the host."""
        kept = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        to, at = ctypes.c_void_p(kept.data_ptr()), ctypes.c_uint64(address)
        self.call("cuMemcpyDtoH_v2", to, at, ctypes.c_size_t(num_bytes))
        return kept

    def restore(self, address: int, kept: torch.Tensor) -> None:
        """What save() returned, back in place."""
        at, source = ctypes.c_uint64(address), ctypes.c_void_p(kept.data_ptr())
        self.call("cuMemcpyHtoD_v2", at, source, ctypes.c_size_t(kept.numel()))

    def wait(self) -> None:
        """Until the GPU has done what it was given; other threads run on meanwhile."""
        self.call("cuCtxSynchronize")

    def clear(self, address: int, num_bytes: int) -> None:
        """Zeros."""
        zero = ctypes.c_ubyte(0)
        self.call("cuMemsetD8_v2", ctypes.c_uint64(address), zero, ctypes.c_size_t(num_bytes))


class _Region:
    """A pool of torch's allocator, over segments of ours."""

    def __init__(self, driver: _Driver) -> None:
        self.driver = driver
        self.segments: dict[int, _Segment] = {}
        self.is_asleep = False
        size, number, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        take = ctypes.CFUNCTYPE(pointer, size, number, pointer)(self._take)
        give = ctypes.CFUNCTYPE(None, pointer, size, number, pointer)(self._give)
        calls = [ctypes.cast(call, pointer).value or 0 for call in (take, give)]
        allocator = torch._C._cuda_customAllocator(calls[0], calls[1])
        _FOR_EVER.extend((take, give, allocator, self))
        self.pool: torch.cuda.MemPool | None = torch.cuda.MemPool(allocator)

    def _take(self, num_bytes: int, device: int, stream: int | None) -> int | None:
        unit = self.driver.unit
        padded = -(-num_bytes // unit) * unit
        address = None
        try:
            address = self.driver.reserve(padded)
            handle = self.driver.map(address, padded)
        except (MemoryError, RuntimeError) as error:  # torch frees what it keeps and tries again
            logger.info("no segment of %d bytes: %s", padded, error)
            if address is not None:
                self.driver.unreserve(address, padded)
            return None
        self.segments[address] = _Segment(address, padded, handle)
        return address

    def _give(self, address: int, num_bytes: int, device: int, stream: int | None) -> None:
        segment = self.segments.pop(address, None)
        if segment is None:
            return
        try:
            if segment.handle is not None:
                self.driver.unmap(address, segment.num_bytes, segment.handle)
            self.driver.unreserve(address, segment.num_bytes)
        except RuntimeError:
            logger.exception("a segment could not be given back")


class CudaMemory:
    """SleepingMemory of one GPU."""

    def __init__(self, device: DeviceBackend) -> None:
        self._device = device
        self._torch_device = torch.device(str(device.device))
        torch.cuda.set_device(self._torch_device)
        self._driver = _Driver(self._torch_device.index or 0)
        self._regions: dict[str, _Region] = {}

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        """See SleepingMemory. What torch kept of freed memory is let go first: it is not for the
        region."""
        self.give_back()
        if tag not in self._regions:
            self._regions[tag] = _Region(self._driver)
        found = self._regions[tag]
        if found.pool is None:
            raise WorkerError(f"region {tag} is closed")
        with torch.cuda.use_mem_pool(found.pool, device=self._torch_device):
            yield

    def sleep(self, tag: str, tensors: Sequence[Any], *, is_lost: bool) -> None:
        """See SleepingMemory."""
        region = self._regions[tag]
        if region.is_asleep:
            return
        self._bind()
        lost = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors] if is_lost else []
        for segment in region.segments.values():
            for start, stop in _without((segment.address, segment.num_bytes), lost):
                kept = self._driver.save(start, stop - start)
                segment.saved.append((start - segment.address, kept))
        for segment in region.segments.values():
            if segment.handle is not None:
                self._driver.unmap(segment.address, segment.num_bytes, segment.handle)
                segment.handle = None
        region.is_asleep = True

    def sleeps(self, tag: str) -> bool:
        """See SleepingMemory."""
        return self._regions[tag].is_asleep

    def wake(self, tag: str) -> None:
        """See SleepingMemory."""
        region = self._regions[tag]
        if not region.is_asleep:
            return
        self._bind()
        self.give_back()
        woken: list[_Segment] = []
        try:
            for segment in region.segments.values():
                segment.handle = self._driver.map(segment.address, segment.num_bytes)
                woken.append(segment)
        except (MemoryError, RuntimeError):
            for segment in woken:
                if segment.handle is not None:
                    self._driver.unmap(segment.address, segment.num_bytes, segment.handle)
                    segment.handle = None
            raise
        for segment in woken:
            if sum(kept.numel() for _, kept in segment.saved) < segment.num_bytes:
                self._driver.clear(segment.address, segment.num_bytes)
            for offset, kept in segment.saved:
                self._driver.restore(segment.address + offset, kept)
            segment.saved = []
        self._driver.wait()
        region.is_asleep = False

    def free_bytes(self) -> int:
        """The driver's figure."""
        return int(torch.cuda.mem_get_info(self._torch_device)[0])

    def give_back(self) -> None:
        """See SleepingMemory."""
        gc.collect()
        torch.cuda.empty_cache()

    def close(self) -> None:
        """The pools let go of their segments, once no tensor lies there."""
        for region in self._regions.values():
            region.pool = None
        self.give_back()

    def _bind(self) -> None:
        """This thread calls this GPU, which has nothing to do any more."""
        torch.cuda.set_device(self._torch_device)
        torch.empty(1, device=self._torch_device)  # makes the GPU's context this thread's
        self._driver.wait()


def _without(segment: tuple[int, int], ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of a segment (address, bytes) lies outside the ranges."""
    found, at = [], segment[0]
    end = segment[0] + segment[1]
    for start, stop in sorted(ranges):
        start, stop = max(start, at), min(stop, end)
        if start < stop:
            if start > at:
                found.append((at, start))
            at = stop
    if at < end:
        found.append((at, end))
    return found
