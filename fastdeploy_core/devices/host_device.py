"""The common base of devices that compute in this machine's own memory.

A subclass gives name, limits and `capture`; tensors are the tensor library's own on the CPU, work
runs when it is called, and ranks meet in shared memory. Importing this imports no tensor library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.device import Communicator, DeviceOptions, MemoryInfo
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.tensor import available, load

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor, TensorLibrary

MAX_TENSOR_PARALLEL = 8
# What the libraries' allocators write when memory runs out; they raise plain RuntimeErrors.
_OOM_TEXTS = (
    "defaultcpuallocator: can't allocate memory",
    "not enough memory",
    "resourceexhausted",
    "cannot allocate memory",
    "std::bad_alloc",
)


class HostDevice:
    """Everything of a DeviceBackend but its name, its limits and capture()."""

    name: str = ""
    contract = CONTRACT
    worker = ""
    device = "cpu"

    def __init__(self, options: DeviceOptions) -> None:
        self.xp: TensorLibrary = load(options.tensor_library or self._default_library())
        self.num_threads = options.num_threads or asked_threads() or usable_cores()
        self.xp.tune_allocator()

    def _default_library(self) -> str:
        found = available()
        if not found:
            raise ConfigError(
                f"device {self.name!r} needs a tensor library and none is installed; possible: "
                'torch, paddle; run: pip install "fastdeploy-core[paddle]"'
            )
        return found[0]

    def memory(self) -> MemoryInfo:
        """The machine's memory, or what is left of a container's limit if that is less."""
        info = _meminfo()
        total, free = info["MemTotal"], info["MemAvailable"]
        for limit, used in _cgroup_limits():
            total = min(total, limit)
            free = min(free, max(0, limit - used))
        return MemoryInfo(total_bytes=total, free_bytes=free)

    def to_device(self, array: np.ndarray) -> Tensor:
        """A tensor over the array's own memory where the library can share it."""
        return self.xp.from_numpy(array)

    def to_host(self, x: Tensor) -> np.ndarray:
        """The values now."""
        return self.xp.to_numpy(x)

    def host_buffer(self, num_bytes: int) -> np.ndarray:
        """Ordinary memory: device memory is no different."""
        return np.zeros(num_bytes, dtype=np.uint8)

    def upload(self, source: np.ndarray, target: Tensor) -> None:
        """Copied now."""
        target.copy_(self.xp.from_numpy(source))

    def download(self, source: Tensor, target: np.ndarray) -> None:
        """Copied now."""
        target[:] = np.ascontiguousarray(self.xp.to_numpy(source)).reshape(-1).view(np.uint8)

    def record_event(self) -> HostEvent:
        """An event that has happened."""
        return HostEvent()

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        """Join the ranks that meet in the private folder `address`."""
        from .host_communicator import SharedMemoryCommunicator

        return SharedMemoryCommunicator(self.xp, rank, world_size, Path(address))

    def is_oom(self, error: BaseException) -> bool:
        """Python's and numpy's MemoryError, and the libraries' allocator messages."""
        if isinstance(error, MemoryError):
            return True
        text = str(error).lower()
        return any(known in text for known in _OOM_TEXTS)

    def is_lost(self, error: BaseException) -> bool:
        """Never: a processor that is gone takes this process with it."""
        return False

    def close(self) -> None:
        """Nothing to give back."""


class HostEvent:
    """Work is done when the call that asked for it returns."""

    def query(self) -> bool:
        """True."""
        return True


def asked_threads() -> int:
    """OMP_NUM_THREADS, which operators set for everything that computes on a CPU; 0: not set."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(int(first), os.cpu_count() or 1) if first.isdecimal() and int(first) else 0


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut by a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for folder in _cgroup_folders():
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            cores = min(cores or 1, max(1, int(quota) // int(period)))
    return cores or 1


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes; elsewhere the one number POSIX offers."""
    values: dict[str, int] = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdecimal():
            values[name] = int(number[0]) * 1024
    if "MemTotal" not in values:
        values["MemTotal"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    values.setdefault("MemAvailable", values.get("MemFree", values["MemTotal"]))
    return values


def _cgroup_folders() -> list[Path]:
    """Version 2 control groups of this process, the innermost first."""
    root = Path("/sys/fs/cgroup")
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        hierarchy, _, path = line.partition("::")
        if hierarchy == "0":
            folder = root / path.strip().lstrip("/")
            chain = [folder, *folder.parents]
            return [f for f in chain if f == root or root in f.parents]
    return [root]


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, used without reclaimable file pages) of each group that has a limit."""
    found = []
    for folder in _cgroup_folders():
        limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if limit.isdecimal() and used.isdecimal():
            cached = 0
            for line in _read(folder / "memory.stat").splitlines():
                if line.startswith("inactive_file "):
                    cached = int(line.split()[1])
            found.append((int(limit), max(0, int(used) - cached)))
    old = Path("/sys/fs/cgroup/memory")  # version 1
    limit = _read(old / "memory.limit_in_bytes").strip()
    used = _read(old / "memory.usage_in_bytes").strip()
    if limit.isdecimal() and used.isdecimal():
        found.append((int(limit), int(used)))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
