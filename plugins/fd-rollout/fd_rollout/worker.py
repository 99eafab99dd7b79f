"""A rank that can sleep and take new weights: the core's worker, whose weights and KV caches lie in
memory that can be given back while their addresses stay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastdeploy_core.errors import ConfigError, WorkerError, needs_trace
from fastdeploy_core.worker.worker import Worker

from .experts import Routes, WatchedKernels
from .memory import memory_of
from .weights import Replacement, check_replaceable, model_tensors

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.plugins.kernels import ChosenKernels
    from fastdeploy_core.types import SchedulerOutput
    from fastdeploy_core.types.worker import WorkerInfo

logger = logging.getLogger(__name__)

Answer = dict[str, Any]


class RolloutWorker(Worker):
    """Part `rollout-worker`. `control` is called with no step in flight."""

    # Set while the model is loaded.
    _memory: Any = None  # a SleepingMemory
    _loaded: Any = None  # a LoadedModel
    _kernels: Any = None
    _replacement: Replacement | None = None
    _routes: Routes | None = None
    _has_lent = False  # the KV caches' memory, to the new weights

    def load(self) -> WorkerInfo:
        """See Worker.load. ConfigError for what cannot be had with --enable-rollout."""
        _check(self.config)
        if self.resolved.load("device").worker:
            raise ConfigError(
                f"device {self.resolved.name('device')} runs steps in its own way, which "
                "--enable-rollout cannot pause; leave that out, or choose another --device"
            )
        return super().load()

    def launch(self, step: SchedulerOutput) -> Any:
        """See Worker.launch; with --enable-return-routed-experts the results name experts."""
        if self._routes is None:
            return super().launch(step)
        return self._routes.launch(step, super().launch)

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
        self._loaded = self._replacement = None
        super().close()
        if self._memory is not None:
            self._memory.close()

    def _load_model(
        self, device: DeviceBackend, kernels: ChosenKernels, free_bytes: int
    ) -> LoadedModel:
        self._memory = memory_of(device)
        table: Any = kernels
        if self.config.routes:
            self._routes = Routes(self.config, device)
            table = WatchedKernels(kernels, self._routes)
        with self._memory.region("weights"):
            loaded = super()._load_model(device, table, free_bytes)
        if self._routes is not None:
            self._routes.attach(loaded)
        self._loaded, self._kernels = loaded, kernels
        return loaded

    def _allocate_cache(self, sizes: Sequence[int], host_files: Sequence[str]) -> None:
        with self._memory.region("kv_cache"):
            super()._allocate_cache(sizes, host_files)

    # -- actions ----------------------------------------------------------------------------------

    def _sleep(self, action: Answer) -> Answer:
        device = self._ready()[1]
        if action["level"] == 2 and "weights" in action["tags"]:
            try:
                check_replaceable(self.config)
            except ConfigError as error:
                raise ConfigError(
                    f"level 2 reads the weights again when they wake, but {error}; sleep at level "
                    "1, which keeps them in host memory"
                ) from error
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
        if self._replacement is None:
            raise WorkerError("commit comes after prepare")
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


def _check(config: EngineConfig) -> None:
    """ConfigError for what cannot be had with --enable-rollout."""
    found = ""
    if config.parallel.data_parallel_size > 1:
        found = "--data-parallel-size above 1: control one engine each"
    elif config.cache.kv_store:
        found = "--kv-store: its blocks would outlive the weights that they were computed with"
    elif config.handover.transport:
        found = "--kv-transport: other instances may have other weights"
    if found:
        raise ConfigError(f"--enable-rollout is not possible with {found}")
    if config.routes and (config.lora is not None or config.cache.swap_space_bytes):
        found = "--enable-lora" if config.lora is not None else "--swap-space"
        raise ConfigError(f"--enable-return-routed-experts is not possible with {found}")
