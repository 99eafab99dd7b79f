"""A worker process: one of ranks 1 and up of a tensor-parallel group. Rank 0 lives in the engine
process.

It takes commands from one socket and answers on another. Steps are not answered, because rank 0 has
the tokens. Any failure ends the process, because the ranks would disagree from then on.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import zmq

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.errors import needs_trace
from fastdeploy_core.plugins.drivers import part
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.types import SchedulerOutput

from . import child, wire

logger = logging.getLogger(__name__)

CORE_WORKER = "fastdeploy_core.worker.worker:Worker"
STEP = b"step"
CALL = b"call"


def make_worker(
    config: EngineConfig, resolved: ResolvedPlugins, rank: int, world_size: int, address: str
) -> Any:
    """The worker class that the device asks for, constructed for one rank."""
    if config.rollout:
        return part("rollout-worker", "--enable-rollout")(
            config, resolved, rank, world_size, address
        )
    target = resolved.load("device").worker or CORE_WORKER
    module, _, name = target.partition(":")
    worker_class = getattr(importlib.import_module(module), name)
    return worker_class(config, resolved, rank, world_size, address)


def command_address(folder: str, rank: int) -> str:
    """Address at which a rank receives its commands."""
    return f"ipc://{folder}/rank{rank}"


def status_address(folder: str) -> str:
    """Address to which all ranks send answers."""
    return f"ipc://{folder}/status"


def main(data: bytes) -> int:
    """Run one rank until told to close."""
    init: wire.WorkerInit = wire.decoder(wire.WorkerInit).decode(data)
    context = zmq.Context()
    commands, status = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(command_address(init.folder, init.rank))
    status.connect(status_address(init.folder))
    try:
        init.resolved.verify(init.digest)
        _serve(init, commands, status)
    except BaseException as error:
        trace = error if needs_trace(error) else None
        logger.error("rank %s failed: %s", init.rank, error, exc_info=trace)
        failure = wire.WorkerFailed(init.rank, type(error).__name__, str(error))
        status.send(wire.encode(failure))
        context.destroy(linger=1000)
        return 1
    context.destroy(linger=0)
    return 0


def _serve(init: wire.WorkerInit, commands: zmq.Socket[bytes], status: zmq.Socket[bytes]) -> None:
    decode_call = wire.decoder(wire.ToWorker)
    decode_step = wire.decoder(SchedulerOutput)
    worker = make_worker(init.config, init.resolved, init.rank, init.world_size, init.address)
    pending: Any = None
    while True:
        # As on rank 0, the next step may be queued on the device before this one is waited for.
        if pending is not None and not commands.poll(0):
            pending.wait()
            pending = None
        kind, payload = commands.recv_multipart()
        if kind == STEP:
            launched = worker.launch(decode_step.decode(payload))
            if pending is not None:
                pending.wait()
            pending = launched
            continue
        call = decode_call.decode(payload)
        if isinstance(call, wire.Load):
            status.send(wire.encode(wire.Loaded(init.rank, worker.load())))
        elif isinstance(call, wire.InitializeCache):
            worker.initialize_cache(*call.num_blocks, **call.options)
            child.end_startup()
            status.send(wire.encode(wire.CacheReady(init.rank)))
        elif isinstance(call, wire.Control):
            status.send(wire.encode(wire.Controlled(worker.control(call.action))))
        else:
            worker.close()
            return
