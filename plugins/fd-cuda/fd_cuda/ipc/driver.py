"""The CUDA driver by ctypes: memory that other processes map, and copies on streams of their own.

Calls release the interpreter lock. A handle names memory to other processes of the host; in the one
that allocated it, it means the memory itself.
"""

from __future__ import annotations

import ctypes
import secrets
import struct
import threading
from typing import Final

from fastdeploy_core.errors import CapabilityError, ResourceError

HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_NON_BLOCKING: Final = 1
_FIRST_PRIORITY: Final = -5  # the driver takes the next one that there is
_NAME: Final = struct.Struct("!16sQ64s")  # process, address there, the driver's handle
_PROCESS: Final = secrets.token_bytes(16)


class Handle(ctypes.Structure):
    """Of a whole allocation."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class Driver:
    """Functions of libcuda. ResourceError where one fails."""

    def __init__(self) -> None:
        """CapabilityError without a driver."""
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CapabilityError(f"no NVIDIA driver: {error}") from None
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, function: str, *arguments: object) -> None:
        """One function, by its name in cuda.h."""
        code = getattr(self.library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode("ascii", "replace")
            raise ResourceError(f"{function} failed: {reason} ({code})")

    def bind(self, index: int) -> None:
        """This thread works with GPU `index`: in its primary context, which is torch's."""
        if index not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[index] = context
        self.call("cuCtxSetCurrent", self._contexts[index])

    def allocate(self, num_bytes: int) -> int:
        """Address of memory that can be shared."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return int(address.value)

    def free(self, address: int) -> None:
        """What `allocate` gave."""
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> Handle:
        """Of an allocation."""
        handle = Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return handle

    def open(self, handle: Handle) -> int:
        """Map an allocation of another process; close() ends that."""
        address = ctypes.c_uint64()
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, flags)
        return int(address.value)

    def close(self, address: int) -> None:
        """What `open` gave."""
        self.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def stream(self) -> int:
        """A stream that waits for no other one, and goes before others."""
        stream = ctypes.c_void_p()
        how = ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(_FIRST_PRIORITY)
        self.call("cuStreamCreateWithPriority", ctypes.byref(stream), *how)
        return int(stream.value or 0)

    def end_stream(self, stream: int) -> None:
        """Once it is idle."""
        self.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy between any two GPUs."""
        self.call(
            "cuMemcpyDtoDAsync_v2",
            *(ctypes.c_uint64(target), ctypes.c_uint64(source)),
            *(ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream)),
        )

    def wait(self, stream: int) -> None:
        """Return when all that was queued is done; other threads run meanwhile."""
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))


class Mappings:
    """Memory of other processes that this one has mapped, each allocation once for each GPU."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._lock = driver, threading.Lock()
        self._mapped: dict[tuple[int, bytes], list[int]] = {}  # address, users

    def open(self, index: int, name: bytes) -> int:
        """Address of the memory that `name_of` names, for GPU `index`; the thread is bound to it.
        ValueError for bytes that are no name."""
        if len(name) != _NAME.size:
            raise ValueError(f"{len(name)} bytes are no name of GPU memory")
        process, address, handle = _NAME.unpack(name)
        if process == _PROCESS:
            return int(address)
        with self._lock:
            if (index, name) not in self._mapped:
                mapped = self._driver.open(Handle.from_buffer_copy(handle))
                self._mapped[index, name] = [mapped, 0]
            entry = self._mapped[index, name]
            entry[1] += 1
            return entry[0]

    def close(self, index: int, name: bytes) -> None:
        """As often as open()."""
        with self._lock:
            entry = self._mapped.get((index, name))
            if entry is not None:
                entry[1] -= 1
                if not entry[1]:
                    del self._mapped[index, name]
                    self._driver.bind(index)
                    self._driver.close(entry[0])


def name_of(driver: Driver, address: int) -> bytes:
    """What other processes find the allocation with."""
    return _NAME.pack(_PROCESS, address, bytes(driver.handle(address)))
