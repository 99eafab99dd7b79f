"""Memory of this GPU that the other ranks' GPUs read and write directly, through the CUDA driver.

Each rank allocates one piece and gives the others a handle of it; they map it into their own
address space. There is no multicast: plain loads and stores over NVLink or PCIe.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import torch
from fastdeploy_core.errors import ResourceError

from .ipc.driver import Driver, Handle

if TYPE_CHECKING:
    from torch.distributed import Store

_POINTER_DEVICE: Final = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NATIVE_ATOMICS: Final = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class PeerMemory:
    """`addresses[r]`: the address of rank r's piece in this process."""

    def __init__(self, store: Store, name: str, rank: int, world_size: int, num_bytes: int) -> None:
        torch.cuda.synchronize()  # makes torch's context current in this thread
        self._driver = Driver()
        self._opened: list[int] = []
        self.addresses: list[int] = []
        self._own = self._driver.allocate(num_bytes)
        try:
            zero = ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes)
            self._driver.call("cuMemsetD8_v2", ctypes.c_uint64(self._own), *zero)
            store.set(f"{name}/{rank}", bytes(self._driver.handle(self._own)).hex())
            for peer in range(world_size):
                self.addresses.append(self._open(store, name, peer, rank))
            for peer, address in enumerate(self.addresses):
                self._check_atomics(peer, address)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the other ranks' pieces and free the own one."""
        with suppress(ResourceError):  # a lost GPU
            for address in self._opened:
                self._driver.close(address)
        self._opened.clear()
        if self._own:
            with suppress(ResourceError):
                self._driver.free(self._own)
            self._own = 0

    def set_word(self, offset: int, value: int) -> None:
        """Write one 32-bit word of the own piece, from any thread, while the GPU may be busy."""
        with torch.cuda.stream(torch.cuda.Stream()):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            self._driver.call(
                "cuMemsetD32Async",
                ctypes.c_uint64(self._own + offset),
                ctypes.c_uint(value),
                ctypes.c_size_t(1),
                stream,
            )

    def _open(self, store: Store, name: str, peer: int, rank: int) -> int:
        if peer == rank:
            return self._own
        handle = Handle.from_buffer_copy(bytes.fromhex(store.get(f"{name}/{peer}").decode()))
        address = self._driver.open(handle)
        self._opened.append(address)
        return address

    def _check_atomics(self, peer: int, address: int) -> None:
        """ResourceError if atomics of this GPU do not reach the peer's memory as such, as over most
        PCIe links: who waits for one there may wait for ever."""
        places = [ctypes.c_int(), ctypes.c_int()]
        for place, piece in zip(places, (self._own, address), strict=True):
            question = _POINTER_DEVICE, ctypes.c_uint64(piece)
            self._driver.call("cuPointerGetAttribute", ctypes.byref(place), *question)
        if places[0].value == places[1].value:
            return
        found = ctypes.c_int()
        self._driver.call("cuDeviceGetP2PAttribute", ctypes.byref(found), _NATIVE_ATOMICS, *places)
        if not found.value:
            raise ResourceError(f"the link to the GPU of rank {peer} carries no native atomics")
