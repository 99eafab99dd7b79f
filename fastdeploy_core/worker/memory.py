"""How much memory the KV pool may take, and how many blocks that is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.contracts.device import MemoryInfo
from fastdeploy_core.errors import ResourceError
from fastdeploy_core.types.worker import WorkerInfo

GIB = 1024**3
POLL_S = 0.002
# Where the pool and everything else share the host's memory, half of what is free stays free.
SHARED_FRACTION = 0.5


class LowWater:
    """The least free memory seen while the block runs; a thread asks the driver."""

    def __init__(self, memory: Callable[[], MemoryInfo]) -> None:
        self._memory = memory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-profile", daemon=True)
        self.free_bytes = memory().free_bytes

    def __enter__(self) -> LowWater:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        self.free_bytes = min(self.free_bytes, self._memory().free_bytes)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of one rank. `step_bytes`: what a step of maximal size needs beside weights and cache."""

    total_bytes: int
    free_bytes: int  # with the weights loaded, between steps
    weight_bytes: int
    step_bytes: int
    utilization: float
    shared_with: int = 0  # ranks that share this memory with the whole host; 0: device memory

    @property
    def available_bytes(self) -> int:
        """What is left for the KV pool; may be negative."""
        used = self.total_bytes - self.free_bytes
        left = int(self.total_bytes * self.utilization) - used - self.step_bytes
        if self.shared_with:
            left = min(left, int(self.free_bytes * SHARED_FRACTION)) // self.shared_with
        return left

    def arithmetic(self) -> str:
        """For messages: where the bytes go."""
        used = self.total_bytes - self.free_bytes
        text = (
            f"{self.total_bytes / GIB:.2f} GiB x {self.utilization:g} usable"
            f" - {used / GIB:.2f} GiB in use (weights {self.weight_bytes / GIB:.2f} GiB)"
            f" - {self.step_bytes / GIB:.2f} GiB for the largest step"
        )
        if self.shared_with:
            text += (
                f", at most {SHARED_FRACTION:g} of {self.free_bytes / GIB:.2f} GiB free host memory"
                f" for {self.shared_with} rank(s)"
            )
        return f"{text} = {self.available_bytes / GIB:.2f} GiB for the KV cache"


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Sizes of both tiers."""

    num_blocks: int
    num_host_blocks: int


def blocks_per_sequence(max_model_len: int, block_size: int) -> int:
    """Blocks that one sequence of full length takes."""
    return -(-max_model_len // block_size)


def plan_blocks(infos: list[WorkerInfo], config: EngineConfig) -> BlockPlan:
    """Block counts that every rank can hold, or ResourceError with the arithmetic."""
    info = min(infos, key=lambda i: i.available_bytes)
    needed = blocks_per_sequence(info.max_model_len, info.block_size)
    num_blocks = config.cache.num_blocks_override
    if num_blocks is None:
        num_blocks = max(info.available_bytes, 0) // info.bytes_per_block
    if num_blocks < needed:
        raise ResourceError(too_little(info, num_blocks, needed))
    num_host_blocks = 0
    if config.cache.swap_space_bytes and info.host_tier:
        num_host_blocks = config.cache.swap_space_bytes // (info.bytes_per_block * len(infos))
    return BlockPlan(num_blocks, num_host_blocks)


def too_little(info: WorkerInfo, num_blocks: int, needed: int) -> str:
    """What failed, what was asked, what is possible, what to change."""
    possible = num_blocks * info.block_size
    return (
        f"the KV cache is too small: one sequence of --max-model-len {info.max_model_len} needs "
        f"{needed} blocks of {info.block_size} tokens "
        f"({needed * info.bytes_per_block / GIB:.2f} GiB); {num_blocks} fit "
        f"({info.available_bytes / GIB:.2f} GiB; {info.memory_arithmetic or 'as configured'}); "
        f"lower --max-model-len to {possible} or less, raise --gpu-memory-utilization, or lower "
        "--max-num-batched-tokens or --max-num-seqs"
    )
