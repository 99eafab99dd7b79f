"""The native runtime of this process: its threads, and the capture in progress.

Kernels are plain functions, so they find the runtime here; the device opens it. Devices of one
process share the threads, and closing the last device ends them.
"""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from fastdeploy_core.errors import ConfigError, WorkerError

from .capture import Capture
from .topology import processors_of

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor, TensorLibrary

FLOAT32, BFLOAT16 = 0, 1
_Memory: TypeAlias = tuple[np.ndarray, int]  # and its address


# Threads of a team meet after every operation. A few threads on one processor are useful for tests;
# with many, a step would hardly end.
MOST_PER_PROCESSOR = 8


class _Lease:
    """Memory as numpy sees it. Every array and tensor over it refers to this object, and the memory
    is given back when the object dies."""

    __slots__ = ("__array_interface__", "_home", "_memory")

    def __init__(
        self, memory: _Memory, home: list[_Memory], shape: tuple[int, ...], typestr: str
    ) -> None:
        self._memory, self._home = memory, home
        self.__array_interface__ = {
            **{"version": 3, "data": (memory[1], False), "shape": shape, "typestr": typestr}
        }

    def __del__(self) -> None:
        self._home.append(self._memory)


class Results:
    """Memory of large results, which is used again once nothing refers to it. New pages can cost as
    much as the work whose result they hold."""

    LEAST = 1 << 20  # bytes; for less, reusing memory takes longer than new pages

    def __init__(self, make: Callable[..., np.ndarray] = np.empty) -> None:
        self._make = make
        self._free: dict[int, list[_Memory]] = defaultdict(list)

    def take(self, num_bytes: int, shape: tuple[int, ...], typestr: str) -> np.ndarray:
        """An array whose memory comes back with its last reference."""
        size = 1 << (num_bytes - 1).bit_length()
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            array = self._make(size, np.uint8)
            memory = (array, array.ctypes.data)
        return np.asarray(_Lease(memory, free, shape, typestr))


class _Local(threading.local):
    capture: Capture | None = None


class Team:
    """Native threads and kernels, and the tensor library whose memory they work on."""

    def __init__(
        self, xp: TensorLibrary, num_threads: int, isa: str = "", rank: int = 0, num_ranks: int = 1
    ) -> None:
        from . import _native

        allowed = sorted(os.sched_getaffinity(0))
        if num_ranks > len(allowed):
            raise ConfigError(
                f"{num_ranks} processes (--tensor-parallel-size times --data-parallel-size) are to "
                f"share {len(allowed)} processors; possible: one process for each at most"
            )
        cpus = processors_of(rank, num_ranks, allowed)
        most = MOST_PER_PROCESSOR * len(cpus)
        if num_threads > most:
            raise ConfigError(
                f"{num_threads} threads are asked for (--num-threads or OMP_NUM_THREADS) on "
                f"{len(cpus)} "
                f"processors, where they would wait for each other; possible: 1 to {most}, best: "
                f"{len(cpus)}"
            )
        pinned = cpus if len(cpus) >= num_threads else []
        if pinned and num_ranks > 1:
            # Also bind the thread that loads the model and the threads it starts, because they
            # allocate.
            os.sched_setaffinity(0, cpus)
        try:
            self.native = _native.Runtime(num_threads, pinned, isa)
        except ValueError as error:
            raise ConfigError(f"FD_CPU_ISA={isa}: {error}") from None
        self._profile = os.environ.get("FD_CPU_PROFILE", "")  # name of a file
        if self._profile:
            self.native.begin_profile()
        self.xp, self.num_threads, self.isa = xp, num_threads, isa
        self.users = 0
        self._results = Results()
        self._codes = {xp.float32: FLOAT32, xp.bfloat16: BFLOAT16}
        self._local = _Local()
        self._carriers: dict[Any, np.dtype[Any]] = {}  # numpy dtype that stands for each dtype

    @property
    def capture(self) -> Capture | None:
        """The capture in progress in this thread."""
        return self._local.capture

    @capture.setter
    def capture(self, value: Capture | None) -> None:
        self._local.capture = value

    def code(self, x: Tensor) -> int:
        """The kernels' code of a tensor's dtype."""
        return self._codes[x.dtype]

    def new(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Memory for a result. During a capture the memory belongs to the captured graph, because
        replays write to it; zero pages cost nothing before they are written."""
        capture = self._local.capture
        carrier = self._carriers.get(dtype)
        if carrier is None:
            name = "uint16" if dtype == self.xp.bfloat16 else self.xp.dtype_name(dtype)
            carrier = self._carriers[dtype] = np.dtype(name)
        num_bytes = math.prod(shape) * carrier.itemsize
        if capture is not None:
            shared = capture.results
            memory = (
                np.zeros(shape, carrier)
                if shared is None
                else shared.take(num_bytes, shape, carrier.str)
            )
        elif num_bytes >= Results.LEAST:
            memory = self._results.take(num_bytes, shape, carrier.str)
        else:
            return self.xp.empty(shape, dtype=dtype)
        made = self.xp.from_numpy(memory, dtype if dtype == self.xp.bfloat16 else None)
        if capture is not None:
            capture.made(made, is_kept=capture.results is None)
        return made

    def reads(self, *tensors: Tensor | None) -> None:
        """Operands that steps compute: a captured graph may replay natively only if its own
        operations made its operands."""
        capture = self._local.capture
        if capture is not None:
            capture.reads(*tensors)

    def keep(self, *tensors: Any) -> None:
        """Keep alive what a captured operation points to, as long as its plan."""
        capture = self._local.capture
        if capture is not None:
            capture.keep(*tensors)

    def call(
        self, operation: Callable[..., None], *arguments: Any, reads: tuple[Tensor | None, ...] = ()
    ) -> None:
        """One operation, now and in the plan of a capture. Tensors and packed matrices pass as what
        the kernels know of them, and live as long as the plan; `reads` as in reads()."""
        capture = self._local.capture
        if capture is not None:
            capture.reads(*reads)
            capture.keep(*(x for x in arguments if hasattr(x, "data_ptr") or hasattr(x, "native")))
        operation(*map(_passed, arguments))

    def owns(self, *tensors: Tensor) -> None:
        """Buffers that the core keeps for its captured steps; their content is read at each
        replay."""
        capture = self.capture
        if capture is not None:
            for tensor in tensors:
                capture.made(tensor)

    def begin_prompts(self, *tensors: Tensor) -> None:
        """Begin the capture of a step with prompts, which may have thousands of tokens: its results
        reuse memory that nothing refers to any more. `tensors` are the core's buffers."""
        if self.capture is not None:
            self.capture.results = Results(np.zeros)
            self.owns(*tensors)

    def begins_with(self, input_ids: Tensor) -> None:
        """The first input of a captured step with prompts is also a buffer of the core."""
        capture = self.capture
        if capture is not None and capture.results is not None:
            capture.made(input_ids)

    def write_profile(self) -> None:
        """Calls and time of every operation, for the file that FD_CPU_PROFILE names."""
        if not self._profile:
            return
        times = sorted(self.native.times().items(), key=lambda item: -item[1][1])
        lines = [f"{s * 1e3:10.1f} ms {n:8d} calls of {name}\n" for name, (n, s) in times]
        with Path(self._profile).open("a") as file:
            file.writelines([*lines, "\n"])


_team: Team | None = None
_lock = threading.Lock()


def open_team(xp: TensorLibrary, num_threads: int, rank: int = 0, num_ranks: int = 1) -> Team:
    """The process's team with num_threads threads, on that library, for one of the ranks of this
    host."""
    global _team
    isa = os.environ.get("FD_CPU_ISA", "")
    with _lock:
        found = _team
        if found is None or (found.xp, found.num_threads, found.isa) != (xp, num_threads, isa):
            found = _team = Team(xp, num_threads, isa, rank, num_ranks)
        found.users += 1
        return found


def close_team(closed: Team) -> None:
    """A user of the team is closed."""
    global _team
    with _lock:
        closed.users -= 1
        if not closed.users:
            closed.write_profile()
            if _team is closed:
                _team = None


def team() -> Team:
    """The process's team."""
    if _team is None:
        raise WorkerError(
            "kernels of device x86 were called, but no such device is open in this process"
        )
    return _team


def rows_of(x: Tensor) -> Tensor:
    """x, or a copy whose last dimension is contiguous; kernels take any distance between rows."""
    return x if x.shape[-1] == 1 or x.stride()[-1] == 1 else x.contiguous()


def _passed(argument: Any) -> Any:
    if argument is None or hasattr(argument, "data_ptr"):
        return address(argument)
    return getattr(argument, "native", argument)


def address(x: Tensor | None) -> int:
    """The address of a tensor's memory; 0 for none."""
    return 0 if x is None else int(x.data_ptr())
