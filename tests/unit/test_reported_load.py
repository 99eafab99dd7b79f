"""What an engine process tells its request scheduler of itself."""

from __future__ import annotations

import zmq

from fastdeploy_core.config import WatchdogConfig
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.engine.processes import engine_process, wire
from fastdeploy_core.engine.processes.engine_process import EngineProcess
from fastdeploy_core.engine.processes.progress import Progress
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.scheduler.local import LocalScheduler
from tests.null_engine import InlineExecutor, make_config, make_request


class Recorder(LocalScheduler):
    """Keeps every capacity that it is asked with."""

    def __init__(self, config):
        super().__init__(config)
        self.capacities = []

    def get_requests(self, capacity, timeout_s=0.0):
        self.capacities.append(capacity)
        return super().get_requests(capacity, 0.0)


def test_capacity_and_load_tell_the_blocks_that_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(
        engine_process,
        "EngineCore",
        lambda config, resolved: EngineCore(config, resolved, InlineExecutor(config)),
    )
    monkeypatch.setattr(ResolvedPlugins, "load", lambda *_: Recorder)
    config = make_config(num_blocks=40, watchdog=WatchdogConfig(progress_timeout_s=0))
    resolved = ResolvedPlugins([], {})
    init = wire.EngineInit(
        config=config, resolved=resolved, folder=str(tmp_path), digest="", front_ends=[]
    )
    context = zmq.Context()
    try:
        process = EngineProcess(init, context, None, Progress(tmp_path, create=True))
        scheduler = process._scheduler
        process._tick()
        scheduler.put_requests([make_request("r", [5] * 24, max_tokens=20)])
        for _ in range(3):
            process._tick()
        process._report_load()
        process._core.close()
    finally:
        context.destroy(linger=0)
    first, *_, last = scheduler.capacities
    assert first.num_free_blocks == 40
    left = process._core.scheduler.kv.pool.num_available
    assert last.num_free_blocks == left < 40
    (load,) = scheduler.loads()
    assert (load.num_free_blocks, load.num_total_blocks) == (left, 40)
