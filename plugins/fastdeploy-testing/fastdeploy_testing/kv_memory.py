"""Memory for tests of KV transports: the host's, or a device's where a driver moves that."""

from __future__ import annotations

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


def place(driver: Any, content: np.ndarray) -> tuple[Any, memoryview | DeviceMemory]:
    """Content in memory that the driver moves: as tests see it, and as regions have it."""
    if not driver.capabilities.device_memory:
        return content, content.reshape(-1).data
    there: DeviceBytes = driver.test_memory(content.nbytes)
    return DeviceArray(there, content), there.memory
