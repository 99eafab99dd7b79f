"""Memory of this GPU that the other ranks' GPUs read and write directly, through the CUDA driver.

Each rank allocates one piece and gives the others a handle of it; they map it into their own
address space. There is no multicast: plain loads and stores over NVLink or PCIe.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch
from fastdeploy_core.errors import ResourceError

if TYPE_CHECKING:
    from torch.distributed import Store

_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_POINTER_DEVICE: Final = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NATIVE_ATOMICS: Final = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class PeerMemory:
    """`addresses[r]`: the address of rank r's piece in this process."""

    def __init__(self, store: Store, name: str, rank: int, world_size: int, num_bytes: int) -> None:
        torch.cuda.synchronize()  # makes torch's context current in this thread
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._own = ctypes.c_uint64()
        self._opened: list[ctypes.c_uint64] = []
        self.addresses: list[int] = []
        self._call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(num_bytes))
        try:
            self._call("cuMemsetD8_v2", self._own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
            handle = _Handle()
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
            store.set(f"{name}/{rank}", bytes(handle).hex())
            for peer in range(world_size):
                self.addresses.append(self._open(store, name, peer, rank))
            for peer, address in enumerate(self.addresses):
                self._check_atomics(peer, address)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the other ranks' pieces and free the own one."""
        for address in self._opened:
            self._driver.cuIpcCloseMemHandle(address)
        self._opened.clear()
        if self._own.value:
            self._driver.cuMemFree_v2(self._own)
            self._own.value = 0

    def set_word(self, offset: int, value: int) -> None:
        """Write one 32-bit word of the own piece, from any thread, while the GPU may be busy."""
        with torch.cuda.stream(torch.cuda.Stream()):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            self._call(
                "cuMemsetD32Async",
                ctypes.c_uint64(self._own.value + offset),
                ctypes.c_uint(value),
                ctypes.c_size_t(1),
                stream,
            )

    def _open(self, store: Store, name: str, peer: int, rank: int) -> int:
        if peer == rank:
            return int(self._own.value)
        handle = _Handle.from_buffer_copy(bytes.fromhex(store.get(f"{name}/{peer}").decode()))
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
        self._opened.append(ctypes.c_uint64(address.value))
        return int(address.value)

    def _check_atomics(self, peer: int, address: int) -> None:
        """ResourceError if atomics of this GPU do not reach the peer's memory as such, as over most
        PCIe links: who waits for one there may wait for ever."""
        places = [ctypes.c_int(), ctypes.c_int()]
        for place, piece in zip(places, (int(self._own.value), address), strict=True):
            self._call(
                "cuPointerGetAttribute", ctypes.byref(place), _POINTER_DEVICE,
                ctypes.c_uint64(piece),
            )  # fmt: skip
        if places[0].value == places[1].value:
            return
        has_atomics = ctypes.c_int()
        self._call("cuDeviceGetP2PAttribute", ctypes.byref(has_atomics), _NATIVE_ATOMICS, *places)
        if not has_atomics.value:
            raise ResourceError(f"the link to the GPU of rank {peer} carries no native atomics")

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode("ascii", "replace")
            raise ResourceError(f"{function} failed: {reason} ({code})")
