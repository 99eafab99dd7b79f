"""One accelerator of torch's: the parts of its Python interface besides tensors.

Used by torch_device.py, for device types that torch knows itself and for those that a
vendor's module registers. Nothing here waits while it holds the interpreter lock: events are
polled, and copies to the host release it.
"""

from __future__ import annotations

import importlib
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_core.errors import ConfigError, WorkerError
from fastdeploy_core.tensor import load

TORCH = load("torch")

import torch  # noqa: E402 - after load(), which prepares the process for it
import torch.distributed as dist  # noqa: E402

_JOIN_LIMIT = timedelta(seconds=120)
_POLL_S = 0.0002


def count(type_name: str, module: str) -> int:
    """Number of chips of that type that this process may use; imports the vendor's module, if
    any."""
    if module:
        importlib.import_module(module)
    found = getattr(torch, type_name, None)
    return int(found.device_count()) if found is not None else 0


class Place:
    """The chip `type:index`. Any thread may call; each call makes the chip the thread's current
    one."""

    def __init__(self, type_name: str, index: int, pinned: bool) -> None:
        self.type_name, self.index = type_name, index
        self.device = f"{type_name}:{index}"
        self._module = torch.get_device_module(type_name)
        self._pinned = pinned
        self.bind()

    def bind(self) -> None:
        """Make the chip this thread's current one."""
        if self._module.current_device() != self.index:
            self._module.set_device(self.index)

    def driver_memory(self) -> tuple[int, int] | None:
        """(free, total) bytes if the module can ask the driver, else None."""
        ask = getattr(self._module, "mem_get_info", None)
        if ask is None:
            return None
        free, total = ask(self.index)
        return int(free), int(total)

    def reserved_bytes(self) -> int:
        """Bytes that the module's allocator holds; 0 if it does not say."""
        ask = getattr(self._module, "memory_reserved", None)
        return int(ask(self.index)) if ask is not None else 0

    def upload(self, array: np.ndarray) -> Any:
        """A tensor of the array's values on the chip."""
        self.bind()
        return TORCH.from_numpy(np.ascontiguousarray(array) if array.ndim else array).to(
            self.device
        )

    def host_buffer(self, num_bytes: int) -> np.ndarray:
        """Zeros, page-locked if the chip's runtime has such memory."""
        self.bind()
        buffer: np.ndarray = torch.zeros(
            num_bytes, dtype=torch.uint8, pin_memory=self._pinned
        ).numpy()
        return buffer

    def copy_in(self, source: np.ndarray, target: Any) -> None:
        """Queue the copy on the current stream."""
        self.bind()
        target.copy_(torch.from_numpy(source), non_blocking=True)

    def copy_out(self, source: Any, target: np.ndarray) -> None:
        """Queue the copy on the current stream."""
        self.bind()
        if source.numel():
            flat = source.detach().view(-1).view(torch.uint8)
            torch.from_numpy(target).copy_(flat, non_blocking=True)

    def event(self) -> Any:
        """An event of the work queued so far; has query()."""
        self.bind()
        own = getattr(self._module, "Event", None)
        event = own() if own is not None else torch.Event(self.device)
        event.record()
        return event

    def works(self) -> bool:
        """Whether a tiny computation completes; after a fault most chips never answer again."""
        try:
            return bool((self.upload(np.ones(2, np.float32)) + 1).cpu().tolist() == [2.0, 2.0])
        except Exception:
            return False

    def close(self) -> None:
        """Give cached memory back to the driver."""
        empty = getattr(self._module, "empty_cache", None)
        if empty is not None:
            empty()


def is_oom(error: BaseException) -> bool:
    """Whether the error is torch's own class for it, or has a runtime's words for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


class Collectives:
    """torch's distributed package, by the name of a backend, as a Communicator. One group per
    process."""

    def __init__(
        self, place: Place, backend: str, rank: int, world_size: int, address: str
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is outside a group of {world_size}")
        self.rank, self.world_size, self._place = rank, world_size, place
        self._joined = world_size > 1
        if not self._joined:
            return
        if not dist.is_backend_available(backend):
            raise WorkerError(
                f"ranks cannot join: this torch ({torch.__version__}) has no collectives backend "
                f"{backend!r}; install the vendor's, or use one chip"
            )
        place.bind()
        dist.init_process_group(
            backend,
            store=_store(rank, world_size, address),
            rank=rank,
            world_size=world_size,
            timeout=_JOIN_LIMIT,
        )
        self.barrier()

    def all_reduce(self, x: Any) -> Any:
        """The sum over ranks; in place if x is contiguous."""
        if self._joined and x.numel():
            x = x.contiguous()
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Any, dim: int = -1) -> Any:
        """Every rank's x along dim."""
        if not self._joined:
            return x
        x = x.contiguous()
        out = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        if x.numel():
            dist.all_gather_into_tensor(out, x)
        if dim % x.ndim == 0:
            return out
        return torch.cat(out.split(x.shape[0] or 1) if x.shape[0] else [x] * self.world_size, dim)

    def broadcast(self, x: Any, source: int = 0) -> Any:
        """x becomes the source's value."""
        if self._joined and x.numel():
            x = x.contiguous()
            dist.broadcast(x, source)
        return x

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        if not self._joined:
            return
        token = torch.zeros(1, device=self._place.device)
        dist.all_reduce(token)
        event = self._place.event()
        while not event.query():
            time.sleep(_POLL_S)
        token.cpu()  # raises the error of the stream, if there was one

    def close(self) -> None:
        """Leave the group."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()


def _store(rank: int, world_size: int, address: str) -> Any:
    """The store through which ranks meet: a private folder, or host:port of rank 0."""
    if Path(address).is_dir():
        return dist.FileStore(str(Path(address) / "torch"), world_size)
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"address {address!r} is neither a folder nor host:port")
    return dist.TCPStore(host, int(port), world_size, is_master=rank == 0, timeout=_JOIN_LIMIT)
