"""One rank: builds the device, loads the model, measures memory, and runs steps.

Rank 0 lives in the engine process, the others in processes of their own; all get the same messages.
Called by engine/executor.py only. What a step does is model_runner.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.types import SchedulerOutput
from fastdeploy_core.types.worker import WorkerInfo

if TYPE_CHECKING:
    from fastdeploy_core.plugins.resolve import ResolvedPlugins

    from .pending import PendingOutput


class Worker:
    """A rank of a tensor-parallel group."""

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedPlugins,
        rank: int = 0,
        world_size: int = 1,
        address: str = "",
    ) -> None:
        self.config = config

    def load(self) -> WorkerInfo:
        """Build the device, load the weights, and measure what a step of maximal size needs."""
        raise NotImplementedError

    def initialize_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV pool, and the host tier when num_host_blocks is above 0."""

    def launch(self, step: SchedulerOutput) -> PendingOutput:
        """Queue one step's work on the device; the result is fetched with PendingOutput.wait()."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the device back."""
