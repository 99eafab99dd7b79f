"""What blocks pass through that come from outside the engine or go there: the host tiers of all
ranks, in memory that the engine's process shares with them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.contracts.kv_transport import DeviceMemory
from fastdeploy_core.errors import CapabilityError
from fastdeploy_core.kvcache import CachePlan, HostTier, KVCacheManager
from fastdeploy_core.loading.revision import fingerprint
from fastdeploy_core.types.worker import WorkerInfo

_SEAL_FUTURE_WRITE: Final = 0x10  # of <linux/fcntl.h>; fcntl does not have it everywhere
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE
_MAX_WORDS: Final = 4096  # of a TierDevice
_TOUCHED_BYTES: Final = 64 << 20
Tasks = queue.SimpleQueue[Callable[[], None] | None]


class HostMemory:
    """The host tiers of all ranks of an engine."""

    def __init__(
        self, num_ranks: int, plan: CachePlan, asked: str, *, on_device: bool = False
    ) -> None:
        """CapabilityError where there is no host tier, or one of several groups of layers with
        `on_device`; asked: the arguments that need it; on_device: its blocks lie in memory of the
        device (TierDevice), whose ranks tell where."""
        if not plan.num_host_blocks:
            raise CapabilityError(f"{asked} needs the host tier, and {plan.report[-1]}")
        if plan.bounded and on_device:
            kinds = " and ".join(group.rule.kind for group in plan.bounded)
            raise CapabilityError(
                f"{asked} passes on blocks of layers that need every token, and this model has "
                f"layers with a {kinds}; leave it out, and --swap-space holds the blocks of all"
            )
        how = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        numbers = range(num_ranks * (1 + len(plan.bounded)))  # of ranks, group by group
        self._files = [os.memfd_create(f"fd-host-tier-{number}", how) for number in numbers]
        self._on_device, self._num_ranks = on_device, num_ranks
        place = "device:" if on_device else ""
        self.paths = [f"{place}/proc/{os.getpid()}/fd/{file}" for file in self._files]
        # Of each group and rank its memory, and the bytes of a block: memoryviews, or DeviceMemory.
        self.groups: list[list[tuple[Any, int]]] = []

    @property
    def ranks(self) -> list[tuple[Any, int]]:
        """Of the first group of layers."""
        return self.groups[0]

    def open(self, kv: KVCacheManager) -> HostTier:
        """The ranks have made the files as large as they need; returns the first group's tier."""
        views = [memoryview(_map(file)) for file in self._files]
        if self._on_device:
            views = [_device_memory(view) for view in views]
        else:
            threading.Thread(target=_touch, args=(views,), name="fd-kv-touch", daemon=True).start()
        for tier in kv.tiers:
            own, views = views[: self._num_ranks], views[self._num_ranks :]
            self.groups.append([(view, view.nbytes // tier.num_blocks) for view in own])
        for file in self._files:
            # From here on whoever gets the descriptor can read, and write no byte.
            with contextlib.suppress(OSError):  # an older kernel
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        return kv.host

    def file(self, rank: int, group: int = 0) -> int:
        """Descriptor of a rank's memory for Region, or -1 if it cannot be shown to others."""
        file = self._files[group * self._num_ranks + rank]
        is_sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        return file if is_sealed and not self._on_device else -1

    def close(self) -> None:
        """Regions with these files are gone. Idempotent."""
        for file in self._files:
            os.close(file)
        self._files = []


def _map(file: int) -> Any:
    """Its memory. Blocks of a group without layers are numbers alone, and their file is empty."""
    return mmap.mmap(file, 0) if os.fstat(file).st_size else b""


def _touch(views: list[memoryview]) -> None:
    """In a thread: read each page once, so that the system finds memory for it now. Else the first
    prompts would wait for that, longer than for their blocks."""
    for view in views:
        for at in range(0, len(view), _TOUCHED_BYTES):
            np.frombuffer(view[at : at + _TOUCHED_BYTES], np.uint8)[:: mmap.PAGESIZE].max()


def _device_memory(text: memoryview) -> Any:
    """What a TierDevice wrote down. CapabilityError if it did not: then it is none."""
    try:
        where = json.loads(bytes(text[:_MAX_WORDS]))
        handle = bytes.fromhex(where["handle"])
        return DeviceMemory(where["device"], where["address"], where["nbytes"], handle)
    except (ValueError, KeyError, TypeError):
        raise CapabilityError("this device holds no blocks that other processes reach") from None


def parts_of(ranks: list[tuple[memoryview, int]], number: int) -> list[memoryview]:
    """The bytes of a block on each rank. ranks: of each its memory, and the bytes of a block."""
    return [view[number * size : (number + 1) * size] for view, size in ranks]


def run_threads(name: str, number: int) -> Tasks:
    """Threads that do what is put into the queue, each until it gets None. A call that hangs must
    not keep the process alive."""
    tasks: Tasks = queue.SimpleQueue()

    def work() -> None:
        while (task := tasks.get()) is not None:
            task()

    for _ in range(number):
        threading.Thread(target=work, name=name, daemon=True).start()
    return tasks


def identity_of(config: EngineConfig, infos: list[WorkerInfo], *, with_layout: bool = True) -> str:
    """A text that stands for whatever the content of blocks depends on beside their tokens, on any
    host: the weights and what computes with them; with_layout: and how it lies on each rank."""
    model, drafts = config.model, config.speculative
    made_up = model.seed if model.load_format == "dummy" else None
    parts: list[Any] = [model.hf_config, model.dtype, model.quantization, made_up, drafts]
    draft_path = drafts.options.get("model") if drafts else None
    for path in (model.path, Path(draft_path or model.path)):
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        parts.append(fingerprint(files, with_times=False))
    for info in infos if with_layout else infos[:1]:
        layout = info.kv_layout if with_layout else ""
        parts += [layout, info.block_size, info.tensor_library, info.drivers]
    return "\0".join(map(repr, [config.cache.kv_dtype, *parts]))
