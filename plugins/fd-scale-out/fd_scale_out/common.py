"""What several engines of one server are together: configuration, facts, health, numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from msgspec import structs

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.errors import FastDeployError
from fastdeploy_core.types.engine import (
    CommonHealth,
    CommonStats,
    EngineHealth,
    EngineInfo,
    EngineStats,
)


def config_of(config: EngineConfig, rank: int) -> EngineConfig:
    """The configuration of one of the engines."""
    if config.parallel.data_parallel_size == 1:
        return config
    scheduling = config.request_scheduler
    if scheduling.instance:
        scheduling = replace(scheduling, instance=f"{scheduling.instance}-{rank}")
    parallel = replace(config.parallel, data_parallel_rank=rank)
    return replace(config, parallel=parallel, request_scheduler=scheduling)


def meeting_in(config: EngineConfig, folder: Path) -> EngineConfig:
    """With the folder, which only this user can enter, where engines that share experts meet."""
    return replace(config, parallel=replace(config.parallel, meeting_folder=str(folder)))


def named(error: FastDeployError, rank: int) -> FastDeployError:
    """The same error, with the engine that it is about."""
    return type(error)(f"engine {rank}: {error}")


def common_health(engines: Mapping[int, EngineHealth]) -> EngineHealth:
    """The only engine's own, or CommonHealth."""
    if len(engines) == 1:
        return next(iter(engines.values()))
    each = engines.values()
    is_ready = any(health.ready for health in each)
    reasons = [f"engine {n}: {health.reason}" for n, health in engines.items() if health.reason]
    return CommonHealth(
        alive=any(health.alive for health in each),
        ready=is_ready,
        last_progress_age_s=max(health.last_progress_age_s for health in each),
        reason="" if is_ready else "; ".join(reasons),
        num_restarts=sum(health.num_restarts for health in each),
        engines=dict(engines),
    )


def total(engines: Mapping[int, EngineStats]) -> CommonStats:
    """The numbers of all engines as one."""
    result = CommonStats(engines=dict(engines))
    for name in EngineStats.__struct_fields__:
        values: list[Any] = [getattr(stats, name) for stats in engines.values()]
        if name == "last_step_s":
            summed: Any = max(values)
        elif isinstance(values[0], str):
            summed = values[0]
        elif isinstance(values[0], list):
            summed = [sum(column) for column in zip_longest(*values, fillvalue=0)]
        elif isinstance(values[0], dict):
            keys = dict.fromkeys(key for value in values for key in value)
            summed = {key: sum(value.get(key, 0) for value in values) for key in keys}
        else:
            summed = sum(values)
        setattr(result, name, summed)
    return result


def common_info(infos: Iterable[EngineInfo], count: int) -> EngineInfo:
    """Facts of `count` engines: the room of all, the longest request that any of them can take.
    Those of an engine that has not started yet are taken to be as the others'."""
    known = list(infos)
    return structs.replace(
        known[0],
        num_blocks=sum(info.num_blocks for info in known),
        num_host_blocks=sum(info.num_host_blocks for info in known),
        max_num_seqs=known[0].max_num_seqs * count,
        max_request_tokens=min(info.max_request_tokens for info in known),
        startup_s=max(info.startup_s for info in known),
    )
