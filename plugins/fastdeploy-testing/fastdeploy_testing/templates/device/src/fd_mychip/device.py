"""The device: which tensor library, which device string, what it can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from fastdeploy_core.contracts.device import (
    CapturedGraph,
    Communicator,
    DeviceLimits,
    DeviceOptions,
    MemoryInfo,
)
from fastdeploy_core.errors import CapabilityError
from fastdeploy_core.tensor import Tensor, available, load

LIBRARY = ""  # "torch" or "paddle"; empty takes whichever is installed
DEVICE = "cpu"  # the library's name of the chip, such as "npu:0"; "cpu" lets you start without one


class Event:
    """Work queued so far. On a chip, ask its event whether the work is complete; never wait
    here."""

    def query(self) -> bool:
        return True


class MyChipDevice:
    """One chip as one process sees it."""

    name = "mychip"
    contract = (1, 0)
    worker = ""

    def __init__(self, options: DeviceOptions) -> None:
        self.xp = load(options.tensor_library or LIBRARY or available()[0])
        self.device = DEVICE
        self.limits = DeviceLimits(dtypes=("float32",), shares_host_memory=DEVICE == "cpu")
        if options.num_threads:
            self.xp.set_num_threads(options.num_threads)

    def memory(self) -> MemoryInfo:
        lines = (
            Path("/proc/meminfo").read_text("ascii").splitlines()
        )  # ask the chip's driver instead
        kib = {key: int(rest.split()[0]) for key, rest in (x.split(":") for x in lines)}
        return MemoryInfo(kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024)

    def to_device(self, array: np.ndarray) -> Tensor:
        return self.xp.to_device(self.xp.from_numpy(array), self.device)

    def to_host(self, x: Tensor) -> np.ndarray:
        return self.xp.to_numpy(x)

    # On a chip, these three are its page-locked memory and its asynchronous copies.
    def host_buffer(self, num_bytes: int) -> np.ndarray:
        return np.zeros(num_bytes, dtype=np.uint8)

    def upload(self, source: np.ndarray, target: Tensor) -> None:
        target.copy_(self.to_device(source.copy()))

    def download(self, source: Tensor, target: np.ndarray) -> None:
        target[:] = np.ascontiguousarray(self.to_host(source)).reshape(-1).view(np.uint8)

    def record_event(self) -> Event:
        return Event()

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        raise CapabilityError("device 'mychip' runs alone (limits.max_tensor_parallel_size is 1)")

    def capture(
        self, run: Callable[[], None], beside: CapturedGraph | None = None
    ) -> CapturedGraph:
        raise CapabilityError("device 'mychip' captures no graphs (limits.graph_capture is False)")

    def is_oom(self, error: BaseException) -> bool:
        text = str(error).lower()  # match the error texts of the chip's runtime here
        known = ("can't allocate memory", "cannot allocate memory", "not enough memory")
        return isinstance(error, MemoryError) or any(words in text for words in known)

    def is_lost(self, error: BaseException) -> bool:
        return False

    def close(self) -> None:
        pass
