"""Links to several engines: of the process that starts them, and of one of several API servers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.engine.client import AsyncEngine, EngineLink
from fastdeploy_core.engine.processes import child
from fastdeploy_core.engine.processes.supervisor import Listener, Supervisor
from fastdeploy_core.plugins.resolved import ResolvedPlugins

from .attachment import Attachment
from .balance import Balance
from .common import config_of, meeting_in
from .paths import balance_path, engine_folder
from .replicas import Replicas


def engines(
    config: EngineConfig, resolved: Future[ResolvedPlugins], listener: Listener
) -> EngineLink:
    """Entry point `engines`: the link to --data-parallel-size engines that it starts."""

    folder = child.PrivateFolder("experts") if config.parallel.shares_experts else None
    if folder is not None:
        config = meeting_in(config, folder.path)

    def connect(engine: int, listener: Listener) -> EngineLink:
        return Supervisor(config_of(config, engine), resolved, listener)

    return Replicas(config, connect, listener, Balance(config), folder=folder, owns_engines=True)


async def attach(
    config: EngineConfig,
    resolved: Future[ResolvedPlugins],
    folder: str,
    front_end: int,
    on_drain: Callable[[], None],
) -> AsyncEngine:
    """Attach one front end to the engine, or engines, that another process starts and ends, and
    wait until one is ready. `folder` belongs to that process; its request to drain calls on_drain
    from a thread."""
    timeout_s = config.watchdog.progress_timeout_s

    def connect(engine: int, listener: Listener) -> EngineLink:
        own = engine_folder(folder, engine)
        return Attachment(own, front_end, timeout_s, listener, on_drain)

    def connect_all(listener: Listener) -> EngineLink:
        if config.parallel.data_parallel_size == 1:
            return connect(0, listener)
        balance = Balance(config, front_end, balance_path(folder))
        return Replicas(config, connect, listener, balance, owns_engines=False)

    return await AsyncEngine(config, connect_all, front_end).when_ready(resolved)
