"""The one native runtime of this process: its threads, and what is recorded while a step is captured.

Kernels are plain functions, so the runtime is found here; the device opens it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fastdeploy_core.errors import ConfigError

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor, TensorLibrary

FLOAT32, BFLOAT16 = 0, 1


class Team:
    """Native threads and kernels, and the tensor library whose memory they work on."""

    def __init__(self, xp: TensorLibrary, num_threads: int, isa: str = "") -> None:
        from . import _native

        cpus = sorted(os.sched_getaffinity(0))
        pinned = cpus if len(cpus) >= num_threads else []
        try:
            self.native = _native.Runtime(num_threads, pinned, isa)
        except ValueError as error:
            raise ConfigError(f"FD_CPU_ISA={isa}: {error}") from None
        self.xp = xp
        self._codes = {xp.float32: FLOAT32, xp.bfloat16: BFLOAT16}
        self.kept: list[Any] | None = None  # tensors that a plan being recorded points to

    def code(self, x: Tensor) -> int:
        """How the kernels name a tensor's dtype."""
        return self._codes[x.dtype]

    def new(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Uninitialised memory for a result."""
        return self.xp.empty(shape, dtype=dtype)

    def keep(self, *tensors: Any) -> None:
        """What a recorded operation reads or writes stays alive as long as its plan."""
        if self.kept is not None:
            self.kept.extend(tensors)


_team: Team | None = None


def open_team(xp: TensorLibrary, num_threads: int) -> Team:
    """Start the threads; a process has one team, made by its device."""
    global _team
    _team = Team(xp, num_threads, os.environ.get("FD_CPU_ISA", ""))
    return _team


def team() -> Team:
    """The process's team."""
    assert _team is not None, "the x86 device was not opened in this process"
    return _team


def rows_of(x: Tensor) -> Tensor:
    """x, or a copy whose last dimension is contiguous: kernels take any distance between rows."""
    return x if x.stride()[-1] == 1 or x.shape[-1] == 1 else x.contiguous()


def address(x: Tensor | None) -> int:
    """Where a tensor's memory begins; 0 for none."""
    return 0 if x is None else int(x.data_ptr())
