"""A rank that can sleep and take new weights: the core's worker, whose weights and KV caches lie in
memory that can be given back while their addresses stay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastdeploy_core.errors import ConfigError, needs_trace
from fastdeploy_core.worker.worker import Worker

from .memory import SleepingMemory, memory_of
from .weights import Replacement, check_replaceable, model_tensors

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.plugins.kernels import ChosenKernels
    from fastdeploy_core.types.worker import WorkerInfo

logger = logging.getLogger(__name__)

Answer = dict[str, Any]


class RolloutWorker(Worker):
    """Part `rollout-worker`. `control` is called with no step in flight."""

    _memory: SleepingMemory
    _loaded: LoadedModel
    _kernels: ChosenKernels
    _replacement: Replacement | None = None
    _has_lent = False  # the KV caches' memory, to the new weights

    def load(self) -> WorkerInfo:
        """See Worker.load. ConfigError: the device has a worker of its own."""
        if self.resolved.load("device").worker:
            raise ConfigError(
                f"device {self.resolved.name('device')} runs steps in its own way, which "
                "--enable-rollout cannot pause; leave that out, or choose another --device"
            )
        return super().load()

    def control(self, action: Answer) -> Answer:
        """Do one of the actions below; an error is an answer, since the engine goes on."""
        do: Callable[[Answer], Answer] = getattr(self, f"_{action['do']}")
        try:
            return do(action)
        except Exception as error:
            trace = error if needs_trace(error) else None
            logger.error("%s failed: %s", action["do"], error, exc_info=trace)
            return {"error": f"{action['do']}: {error or type(error).__name__}"}

    def close(self) -> None:
        """See Worker.close."""
        memory = getattr(self, "_memory", None)
        del self._loaded
        super().close()
        if memory is not None:
            memory.close()

    def _load_model(
        self, device: DeviceBackend, kernels: ChosenKernels, free_bytes: int
    ) -> LoadedModel:
        self._memory = memory_of(device)
        with self._memory.region("weights"):
            self._loaded = super()._load_model(device, kernels, free_bytes)
        self._kernels = kernels
        return self._loaded

    def _allocate_cache(self, sizes: Sequence[int], host_file: str) -> None:
        with self._memory.region("kv_cache"):
            super()._allocate_cache(sizes, host_file)

    # -- actions ----------------------------------------------------------------------------------

    def _sleep(self, action: Answer) -> Answer:
        device, freed = self._ready()[1], 0
        before = self._memory.free_bytes()
        for tag in action["tags"]:
            if tag == "kv_cache":
                self._memory.sleep(tag, self._cache_tensors(), is_lost=True)
            else:
                weights = model_tensors(self._loaded, device)
                self._memory.sleep(tag, weights, is_lost=action["level"] == 2)
        freed = self._memory.free_bytes() - before
        return {"freed_bytes": freed}

    def _wake_up(self, action: Answer) -> Answer:
        for tag in action["tags"]:
            self._memory.wake(tag)
        return {}

    def _prepare(self, action: Answer) -> Answer:
        """Read new weights beside the old ones, in the memory of the KV caches, which hold nothing
        that is needed any more."""
        device = self._ready()[1]
        check_replaceable(self.config)
        if not self._memory.sleeps("kv_cache"):
            self._memory.sleep("kv_cache", self._cache_tensors(), is_lost=True)
            self._has_lent = True
        self._replacement = Replacement(
            *(self.config, self._loaded, device, self._kernels, self.rank, self.world_size),
            *(self._communicator, self.resolved.load),
        )
        self._replacement.read(action["source"], action["options"], action["version"])
        return {}

    def _commit(self, action: Answer) -> Answer:
        """Copy what was read into the place of the old weights."""
        assert self._replacement is not None, "prepare comes first"
        num_bytes = self._replacement.copy()
        self._drop(action)
        return {"num_bytes": num_bytes}

    def _drop(self, action: Answer) -> Answer:
        """Let go of what was read."""
        self._replacement = None
        self._memory.give_back()
        if self._has_lent:
            self._has_lent = False
            self._memory.wake("kv_cache")
        return {}

    def _cache_tensors(self) -> list[Any]:
        return [tensor for layer in self._ready()[0].caches.tensors for tensor in layer]
