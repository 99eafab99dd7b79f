"""One accelerator of PaddlePaddle's: the parts of its Python interface besides tensors.

Used by paddle_device.py, for built-in places and for custom devices. Nothing here waits
while it holds the interpreter lock: events are polled, and values are read with numpy(), which
releases it (paddle's synchronize() calls and Tensor.item() do not).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_core.errors import WorkerError
from fastdeploy_core.tensor import load

PADDLE = load("paddle")

import paddle  # noqa: E402 - after load(), which prepares the process for it

FALLBACK_FLAG = "FLAGS_enable_api_kernel_fallback"
_JOIN_S = 120.0
_POLL_S = 0.02


def is_builtin(check: str) -> bool:
    """Whether this build of PaddlePaddle has a place; `check` is the name of its function that
    tells."""
    function = getattr(paddle, check, None)
    return bool(function is not None and function())


def custom_types() -> list[str]:
    """Device types that runtimes registered when PaddlePaddle was imported."""
    return list(paddle.device.get_all_custom_device_type() or [])


def count(type_name: str, builtin_module: str = "") -> int:
    """Number of chips of that type that this process may use; a built-in place has a module of
    paddle.device."""
    if builtin_module:
        return int(getattr(paddle.device, builtin_module).device_count())
    devices = paddle.device.get_available_custom_device() or []
    return sum(name.partition(":")[0] == type_name for name in devices)


class Place:
    """The chip `type:index`, which becomes this process's current one."""

    def __init__(self, type_name: str, index: int, builtin_module: str = "") -> None:
        self.type_name, self.index = type_name, index
        self.device = f"{type_name}:{index}"
        self._module = getattr(paddle.device, builtin_module) if builtin_module else None
        self._graphs: list[Graph] = []
        paddle.set_device(self.device)

    def reserved_bytes(self) -> int:
        """Bytes of the chip's memory that paddle's allocator holds."""
        return int(paddle.device.memory_reserved(self.device))

    def driver_memory(self) -> tuple[int, int] | None:
        """(free, total) bytes if PaddlePaddle can ask the driver, else None."""
        ask = getattr(self._module, "mem_get_info", None)
        if ask is None:
            return None
        free, total = ask(self.index)
        return int(free), int(total)

    def upload(self, array: np.ndarray) -> Any:
        """A tensor of the array's values on the chip."""
        if not array.size:
            dtype = PADDLE.dtype(array.dtype.name)
            return paddle.zeros(array.shape, dtype=dtype, device=self.device)
        # For the host the copy is complete on return: the array may be changed afterwards.
        return PADDLE.to_device(PADDLE.from_numpy(array), self.device)

    def event(self) -> Any:
        """An event of the work queued so far; has query()."""
        if paddle.device.get_device() != self.device:
            paddle.set_device(self.device)  # an event belongs to the current device
        event = paddle.device.Event()
        event.record()
        return event

    def capture(self, run: Callable[[], None], beside: Graph | None) -> Graph:
        """Capture what `run` queues. An operation that would wait is an error."""
        from paddle.device.cuda.graphs import CoreCUDAGraph, CUDAGraph

        pool = beside.pool if beside is not None else CoreCUDAGraph.gen_new_memory_pool_id()
        place = paddle.framework._current_expected_place()
        graph = CUDAGraph(place, mode="thread_local", pool_id=pool)
        graph.capture_begin()
        try:
            run()
        except BaseException:
            # End the capture in any case; the first error says what is wrong.
            with contextlib.suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
        self._graphs.append(Graph(graph, pool))
        return self._graphs[-1]

    def close(self) -> None:
        """Release graphs before the library unloads its devices."""
        while self._graphs:
            self._graphs.pop().reset()

    def works(self) -> bool:
        """Whether a tiny computation completes; after a fault most chips never answer again."""
        try:
            return bool(self.upload(np.ones(2, np.float32)).numpy().tolist() == [1.0, 1.0])
        except Exception:
            return False


class Graph:
    """A captured graph and the memory pool that it shares with graphs captured beside it."""

    def __init__(self, graph: Any, pool: int) -> None:
        self._graph, self.pool = graph, pool

    def replay(self) -> None:
        """Queue the captured work again."""
        self._graph.replay()

    def reset(self) -> None:
        """Release the graph."""
        self._graph.reset()


@contextlib.contextmanager
def without_fallback() -> Iterator[None]:
    """A context in which an operation without a kernel on the chip is an error; otherwise it would
    run on the CPU."""
    before = paddle.get_flags(FALLBACK_FLAG)
    paddle.set_flags({FALLBACK_FLAG: False})
    try:
        yield
    finally:
        paddle.set_flags(before)


def missing_kernel(error: BaseException) -> str:
    """The name of the missing kernel that the error reports; empty for any other error."""
    text = str(error)
    if "(NotFound) The kernel" not in text or " of kernel `" not in text:
        return ""
    return text.partition(" of kernel `")[2].partition("`")[0]


class Collectives:
    """PaddlePaddle's distributed package as a Communicator. One group per process."""

    def __init__(
        self, place: Place, rank: int, world_size: int, address: str, environment: dict[str, str]
    ) -> None:
        self.rank, self.world_size, self._place = rank, world_size, place
        self._joined = world_size > 1
        if not self._joined:
            return
        if environment.get("PADDLE_XCCL_BACKEND") and custom_types()[0] != place.type_name:
            raise WorkerError(
                f"ranks cannot join as {place.type_name!r}: PaddlePaddle joins ranks of the device "
                f"type it registered first, {custom_types()[0]!r}; leave other runtimes out of "
                "CUSTOM_DEVICE_ROOT"
            )
        host, port = _meeting_point(rank, address)
        ports = f"{host}:{port}"
        os.environ |= environment | {
            "PADDLE_MASTER": ports,
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(world_size),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(f"{host}:{port + i}" for i in range(world_size)),
            "PADDLE_CURRENT_ENDPOINT": f"{host}:{port + rank}",
            "PADDLE_RANK_IN_NODE": str(rank),
            f"FLAGS_selected_{place.type_name}s": str(place.index),
        }
        import paddle.distributed as dist

        self._dist = dist
        dist.init_parallel_env()
        self.barrier()

    def all_reduce(self, x: Any) -> Any:
        """x becomes the sum over ranks."""
        if self._joined and x.size:
            x = x.contiguous()
            self._dist.stream.all_reduce(x)
        return x

    def all_gather(self, x: Any, dim: int = -1) -> Any:
        """Every rank's x along dim."""
        if not self._joined:
            return x
        dim %= x.ndim
        shape = list(x.shape)
        if not x.size:
            shape[dim] *= self.world_size
            return paddle.zeros(shape, dtype=x.dtype, device=self._place.device)
        # The form with one tensor: the form with a list of tensors splits the result with a copy
        # that is not ordered after the collective.
        out = paddle.empty(
            [self.world_size * shape[0], *shape[1:]], dtype=x.dtype, device=self._place.device
        )
        self._dist.stream.all_gather(out, x.contiguous())
        if dim == 0:
            return out
        return PADDLE.cat(PADDLE.split(out, shape[0], 0), dim)

    def broadcast(self, x: Any, source: int = 0) -> Any:
        """x becomes the source's value."""
        if self._joined and x.size:
            x = x.contiguous()
            self._dist.stream.broadcast(x, source)
        return x

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        if not self._joined:
            return
        token = paddle.zeros([1], dtype=paddle.float32, device=self._place.device)
        self._dist.stream.all_reduce(token)
        event = self._place.event()
        while not event.query():
            time.sleep(_POLL_S / 100)
        token.numpy()  # raises the error of the stream, if there was one

    def close(self) -> None:
        """Leave the group."""
        if self._joined:
            self._joined = False
            self._dist.destroy_process_group()


def _meeting_point(rank: int, address: str) -> tuple[str, int]:
    """Host and port of rank 0. In a private folder, rank 0 writes the port that it found."""
    if not Path(address).is_dir():
        host, _, chosen = address.rpartition(":")
        return host, int(chosen)
    note = Path(address) / "paddle_port"
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        partial = note.with_suffix(".partial")
        partial.write_text(str(port), "ascii")
        partial.replace(note)
        return "127.0.0.1", port
    deadline = time.monotonic() + _JOIN_S
    while not note.exists():
        if time.monotonic() > deadline:
            raise WorkerError(
                f"rank 0 left no address in {address} within {_JOIN_S:g} s; its process failed or "
                "is still starting"
            )
        time.sleep(_POLL_S)
    return "127.0.0.1", int(note.read_text("ascii"))
