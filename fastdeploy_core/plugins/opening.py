"""Opens the device that was chosen, for one rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.contracts.device import DeviceBackend, DeviceOptions
from fastdeploy_core.errors import CapabilityError

if TYPE_CHECKING:
    from .resolved import ResolvedPlugins


def open_device(
    config: EngineConfig, resolved: ResolvedPlugins, rank: int, world_size: int
) -> DeviceBackend:
    """Engines of one server take devices, or shares of the processors, in their order.

    CapabilityError: it does not join so many ranks, or has no KV blocks of that size."""
    parallel = config.parallel
    num_processes = world_size * parallel.data_parallel_size
    num_threads = config.device.num_threads
    if not num_threads and num_processes > 1:
        # Processes of one host share its cores; each taking all of them would make them wait.
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        num_threads = max(1, cores // num_processes)
    options = DeviceOptions(
        index=parallel.data_parallel_rank * world_size + rank,
        tensor_library=resolved.tensor_library or config.device.tensor_library,
        num_threads=num_threads,
        seed=config.model.seed,
        num_ranks=num_processes,
    )
    device: DeviceBackend = resolved.load("device")(options)
    limits, block_size = device.limits, config.cache.block_size
    if world_size > limits.max_tensor_parallel_size:
        raise CapabilityError(
            f"device {device.name!r} joins at most {limits.max_tensor_parallel_size} ranks; "
            f"--tensor-parallel-size is {world_size}"
        )
    if limits.block_sizes is not None and block_size not in limits.block_sizes:
        raise CapabilityError(
            f"device {device.name!r} has no KV blocks of {block_size} tokens; possible: "
            f"--block-size {' | '.join(map(str, limits.block_sizes))}"
        )
    return device
