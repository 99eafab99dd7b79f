"""Several engines, API servers, divided experts, shared KV blocks or a shared queue, where the
distribution that makes them is not installed."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from fastdeploy_core.config import KVEventsConfig, ParallelConfig, RequestSchedulerConfig
from fastdeploy_core.contracts.scheduler import SchedulerCapabilities
from fastdeploy_core.engine.client import AsyncEngine
from fastdeploy_core.engine.processes import wire
from fastdeploy_core.engine.processes.engine_process import EngineProcess
from fastdeploy_core.errors import PluginNotFound
from fastdeploy_core.plugins import discovery, drivers
from fastdeploy_core.plugins.resolve import resolve
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from tests.null_engine import make_config


@pytest.fixture(autouse=True)
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    there = discovery.discover()
    others = tuple(e for e in there.entries if e.distribution != "fd-scale-out")
    assert len(others) < len(there.entries)
    monkeypatch.setattr(drivers, "discover", lambda: replace(there, entries=others))


def test_several_engines_name_the_command_that_installs_them() -> None:
    config = replace(make_config(), parallel=ParallelConfig(data_parallel_size=2))
    with pytest.raises(PluginNotFound, match=r"--data-parallel-size above 1 .*pip install fd-sc"):
        asyncio.run(AsyncEngine.start(config, Future()))


def test_several_api_servers_name_it_too() -> None:
    with pytest.raises(PluginNotFound, match=r"--api-server-count above 1 .*pip install fd-scale"):
        drivers.part("api-servers", "--api-server-count above 1")


def test_a_shared_queue_names_it_before_a_model_is_loaded() -> None:
    class Shared:
        capabilities = SchedulerCapabilities(shared_queue=True)

    class Resolved(ResolvedPlugins):
        def load(self, kind: str, name: str = "") -> Any:
            return Shared

    config = replace(make_config(), request_scheduler=RequestSchedulerConfig(name="shared"))
    resolved = Resolved([], {})
    init = wire.EngineInit(config=config, resolved=resolved, folder="", digest="", front_ends=[])
    with pytest.raises(PluginNotFound, match=r"--scheduler-name shared .*pip install fd-scale-out"):
        EngineProcess(init, None, None, None)


def test_whole_experts_on_each_rank_name_it_too() -> None:
    with pytest.raises(PluginNotFound, match=r"--enable-expert-parallel .*pip install fd-scale"):
        drivers.find_part("experts", "--enable-expert-parallel", drivers.discover())


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--kv-store", {"kv_store": "disk"}),
        ("--kv-events-config", {"events": KVEventsConfig(True, endpoint="ipc://never")}),
    ],
)
def test_shared_kv_blocks_name_it_before_a_model_is_loaded(
    flag: str, options: dict[str, Any]
) -> None:
    config = make_config()
    config = replace(config, cache=replace(config.cache, **options))
    with pytest.raises(PluginNotFound, match=rf"{flag} .*pip install fd-scale-out"):
        resolve(config, inventory=drivers.discover())
