"""Memory for tests of KV transports: the host's, or a device's where a driver moves that."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import Any, Protocol

import numpy as np

from fastdeploy_core.contracts.kv_transport import DeviceMemory


class DeviceBytes(Protocol):
    """What `test_memory(num_bytes)` of a driver with capability `device_memory` returns: memory of
    the device that a test fills and looks at."""

    memory: DeviceMemory

    def read(self) -> np.ndarray:
        """All bytes, as uint8."""
        ...

    def write(self, content: np.ndarray) -> None:
        """Other content, as uint8; there when this returns."""
        ...


class DeviceArray:
    """Bytes of a device which tests use like an array of numpy."""

    def __init__(self, there: DeviceBytes, content: np.ndarray) -> None:
        self._there, self.shape = there, content.shape
        there.write(content.reshape(-1))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._there.read().reshape(self.shape)

    def __getitem__(self, key: Any) -> np.ndarray:
        part: np.ndarray = np.asarray(self)[key]
        return part

    def __setitem__(self, key: Any, value: Any) -> None:
        content = np.array(np.asarray(self))
        content[key] = value
        self._there.write(content.reshape(-1))

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == other

    def __ne__(self, other: object) -> Any:
        return np.asarray(self) != other

    __hash__ = None  # type: ignore[assignment]

    def reshape(self, *shape: int) -> np.ndarray:
        """A copy in the host's memory."""
        return np.asarray(self).reshape(*shape)


def place(driver: Any, content: np.ndarray) -> tuple[Any, memoryview | DeviceMemory, int]:
    """Content in memory that the driver moves: as tests see it, as regions have it, and the file
    that it is, or -1. With FD_KIT_MEMORY=file in the environment host memory is a file."""
    if driver.capabilities.device_memory:
        there: DeviceBytes = driver.test_memory(content.nbytes)
        return DeviceArray(there, content), there.memory, -1
    if os.environ.get("FD_KIT_MEMORY") != "file" or not content.nbytes:
        return content, content.reshape(-1).data, -1
    file = os.memfd_create("fd-kit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, content.nbytes)
    shared = np.frombuffer(mmap.mmap(file, content.nbytes), np.uint8).reshape(content.shape)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    shared[:] = content
    weakref.finalize(shared, os.close, file)
    return shared, shared.reshape(-1).data, file
