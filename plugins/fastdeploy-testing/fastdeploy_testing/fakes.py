"""Devices without hardware and without a tensor library, for tests of everything around a model.

NullDevice runs no model but produces predictable tokens (null_worker.py). FaultyDevice is the same
and fails on command. Both read options from config.json: section "null" (see NullOptions) and list
"faults" (see Fault); `null_hf_config` writes both.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.contracts.device import (
    CapturedGraph,
    DeviceLimits,
    DeviceOptions,
    MemoryInfo,
)
from fastdeploy_core.errors import CapabilityError, WorkerError
from fastdeploy_core.types import ModelRunnerOutput, SchedulerOutput
from fastdeploy_core.types.worker import WorkerInfo

from .null_worker import NullModel, NullOptions, NullPending, NullWorker

if TYPE_CHECKING:
    from fastdeploy_core.plugins.resolved import ResolvedPlugins

__all__ = [
    "Fault",
    "FaultyDevice",
    "FaultyWorker",
    "NullDevice",
    "NullModel",
    "NullOptions",
    "NullWorker",
    "null_hf_config",
]


class NullDevice:
    """A device that computes nothing."""

    name = "null"
    contract = (1, 0)
    worker = "fastdeploy_testing.fakes:NullWorker"
    device = "null"
    limits = DeviceLimits(
        dtypes=("float32", "bfloat16", "float16"), max_tensor_parallel_size=8, default_block_size=16
    )
    xp: Any = None

    def __init__(self, options: DeviceOptions | None = None) -> None:
        self.options = options or DeviceOptions()

    def memory(self) -> MemoryInfo:
        """A round number."""
        return MemoryInfo(total_bytes=2**30, free_bytes=2**30)

    def to_device(self, array: np.ndarray) -> Any:
        """The array itself."""
        return array

    def to_host(self, x: Any) -> np.ndarray:
        """The array itself."""
        return np.asarray(x)

    def host_buffer(self, num_bytes: int) -> np.ndarray:
        """Ordinary memory."""
        return np.zeros(num_bytes, dtype=np.uint8)

    def upload(self, source: np.ndarray, target: Any) -> None:
        """Copied now."""
        target[:] = source

    def download(self, source: Any, target: np.ndarray) -> None:
        """Copied now."""
        target[:] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)

    def record_event(self) -> NullEvent:
        """An event that has happened."""
        return NullEvent()

    def communicator(self, rank: int, world_size: int, address: str) -> Any:
        """There is nothing to communicate."""
        raise CapabilityError(
            f"device {self.name!r} has no collectives: it computes nothing; its worker needs none"
        )

    def capture(
        self, run: Callable[[], None], beside: CapturedGraph | None = None
    ) -> CapturedGraph:
        """Not offered."""
        raise CapabilityError(f"device {self.name!r} does not capture graphs")

    def is_oom(self, error: BaseException) -> bool:
        """MemoryError stands for it."""
        return isinstance(error, MemoryError)

    def is_lost(self, error: BaseException) -> bool:
        """WorkerError stands for it."""
        return isinstance(error, WorkerError)

    def close(self) -> None:
        """Nothing to give back."""


class NullEvent:
    """Work that is done."""

    def query(self) -> bool:
        """Always."""
        return True


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One entry of list "faults": what happens, and when.

    raise: an ordinary exception in the step. oom: MemoryError. lost: WorkerError, the device is
    gone. hang: never comes back. die: the process is killed. nan: the sequence's logits are
    not finite. slow: the step takes `seconds` longer.
    """

    kind: Literal["raise", "oom", "lost", "hang", "die", "nan", "slow"]
    step: int | None = None  # at this step of the worker, counted from 0
    token: int | None = None  # whenever a sequence runs whose prompt ends with this token
    at_load: bool = False  # while the model is loaded
    decode_only: bool = False  # with `token`: not in prefill steps
    rank: int = 0
    times: int = 0  # 0: every time
    seconds: float = 0.0
    message: str = "injected fault"


class FaultyDevice(NullDevice):
    """A NullDevice that fails on command."""

    name = "faulty"
    worker = "fastdeploy_testing.fakes:FaultyWorker"
    device = "faulty"


class FaultyWorker(NullWorker):
    """A NullWorker that fails as list "faults" of config.json says."""

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedPlugins | None = None,
        rank: int = 0,
        world_size: int = 1,
        address: str = "",
    ) -> None:
        super().__init__(config, resolved, rank, world_size, address)
        self.options.asynchronous = False  # like devices whose steps need threads of their own
        faults = msgspec.convert(config.model.hf_config.get("faults", []), list[Fault])
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._num_fired: dict[int, int] = {}

    def load(self) -> WorkerInfo:
        """As NullWorker, unless a fault says otherwise."""
        for fault in self._faults:
            if fault.at_load and self._is_due(fault):
                _fire(fault)
        return super().load()

    def launch(self, step: SchedulerOutput) -> NullPending:
        """As NullWorker, unless a fault is due."""
        due = [f for f in self._faults if f.step == self.num_steps and self._is_due(f)]
        due += [f for f in self._faults if self._is_hit(f, step) and self._is_due(f)]
        for fault in due:
            if fault.kind == "nan":
                continue
            self.num_steps += fault.kind != "slow"  # a slow step is counted where it runs
            _fire(fault)
        pending = super().launch(step)
        for fault in due:
            if fault.kind == "nan":
                for row, seq_id in enumerate(self.seq_ids(step)):
                    if fault.token is None or self._ends_with(seq_id, fault.token):
                        _break(pending.wait(), row)
        return pending

    def _is_due(self, fault: Fault) -> bool:
        key = id(fault)
        if fault.times and self._num_fired.get(key, 0) >= fault.times:
            return False
        self._num_fired[key] = self._num_fired.get(key, 0) + 1
        return True

    def _is_hit(self, fault: Fault, step: SchedulerOutput) -> bool:
        if fault.token is None:
            return False
        if not fault.decode_only and any(
            new.token_ids[new.num_prompt_tokens - 1] == fault.token for new in step.new_sequences
        ):
            return True
        return any(self._ends_with(seq_id, fault.token) for seq_id in self.seq_ids(step))

    def _ends_with(self, seq_id: int, token: int) -> bool:
        state = self._sequences.get(seq_id)
        if state is None:
            return False
        end = state.new.num_prompt_tokens
        return state.tokens[end - 1 : end] == [token]  # none while the prompt is not whole


def _break(output: ModelRunnerOutput, row: int) -> None:
    """The row's logits were not finite: it has no tokens."""
    assert output.counts is not None, "steps whose tokens are predictable say how many there are"
    first = int(output.counts[:row].sum())
    output.token_ids = np.delete(output.token_ids, slice(first, first + int(output.counts[row])))
    output.counts[row] = 0
    output.errors[row] = "nan_logits"


def _fire(fault: Fault) -> None:
    if fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "hang":
        while True:
            time.sleep(3600)
    elif fault.kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "oom":
        raise MemoryError(fault.message)
    elif fault.kind == "lost":
        raise WorkerError(fault.message)
    else:
        raise RuntimeError(fault.message)


def null_hf_config(*, faults: Sequence[Mapping[str, Any]] = (), **options: Any) -> dict[str, Any]:
    """The config.json of a fake model; `options` are fields of NullOptions."""
    return {"null": options, "faults": [dict(fault) for fault in faults]}
