"""One of several API server processes that share a port: tokenizes, streams, detokenizes.

The process of front_ends.py starts it, tells it about the engine, gives it connections and ends it.
It has no port of its own and never restarts anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.engine.processes import child, wire
from fastdeploy_core.errors import FastDeployError
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.serving.http import event_loop

from .paths import door_path, occupancy_path

if TYPE_CHECKING:
    from fastdeploy_core.serving.server import ApiServer

logger = logging.getLogger(__name__)

METRICS_FOLDER = "metrics"
MAX_DESCRIPTORS = 16  # received in one call


class FrontEndInit(msgspec.Struct, kw_only=True):
    """What an API server process needs to start."""

    engine_config: EngineConfig
    server_config: ServerConfig
    resolved: ResolvedPlugins
    digest: str
    folder: str
    number: int
    count: int


class Hello(msgspec.Struct):
    """What an API server says on the front door's own socket: first who it is, then that it takes
    connections."""

    number: int
    pid: int
    error_type: str = ""  # why it cannot serve; it then ends
    message: str = ""


def main(data: bytes) -> int:
    """Serve until told to stop; returns the exit status."""
    init: FrontEndInit = wire.decoder(FrontEndInit).decode(data)
    # prometheus_client reads this when it is imported, so no module above may import it.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = f"{init.folder}/{METRICS_FOLDER}"
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.connect(door_path(init.folder))
    door.send(msgspec.msgpack.encode(Hello(init.number, os.getpid())))
    try:
        init.resolved.verify(init.digest)
        return event_loop.run(_serve(init, door))
    except BaseException as error:
        is_known = isinstance(error, FastDeployError)
        trace = None if is_known else error
        logger.error("API server %d cannot serve: %s", init.number, error, exc_info=trace)
        message = str(error) or type(error).__name__
        hello = Hello(init.number, os.getpid(), type(error).__name__, message)
        door.send(msgspec.msgpack.encode(hello))
        return 1


async def _serve(init: FrontEndInit, door: socket.socket) -> int:
    from fastdeploy_core.serving.front.occupancy import Occupancy, OwnOccupancy
    from fastdeploy_core.serving.launch import app_around, watch
    from fastdeploy_core.serving.server import ApiServer

    from .links import attach

    loop = asyncio.get_running_loop()
    this = asyncio.current_task()
    stop: list[Callable[[], object]] = [this.cancel if this is not None else lambda: None]
    table = Occupancy(init.count, occupancy_path(init.folder))
    own = OwnOccupancy(table, init.number)

    def on_drain() -> None:  # called from another thread
        loop.call_soon_threadsafe(lambda: stop[-1]())

    plugins: Future[ResolvedPlugins] = Future()
    plugins.set_result(init.resolved)
    config = init.engine_config
    starting = attach(config, plugins, init.folder, init.number, on_drain)
    async with app_around(starting, config, init.server_config, plugins, own) as (app, engine):
        server = ApiServer(app, init.server_config)
        child.end_startup()
        stop.append(server.stop)
        death = asyncio.create_task(watch(engine, server))
        taking = asyncio.create_task(_take_connections(init, door, server))
        try:
            await server.serve(sockets=[])
        finally:
            death.cancel()
            taking.cancel()
    return server.exit_code


async def _take_connections(init: FrontEndInit, door: socket.socket, server: ApiServer) -> None:
    """Ask for connections once the app runs, and serve those that arrive."""
    while not server.started:
        await asyncio.sleep(0.005)
    loop = asyncio.get_running_loop()
    door.setblocking(False)

    def take() -> None:
        data, descriptors, _, _ = socket.recv_fds(door, 1, MAX_DESCRIPTORS)
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            connection.setblocking(False)
            server.adopt(connection)
        if not data:  # the front door was closed
            loop.remove_reader(door)

    loop.add_reader(door, take)
    await loop.sock_sendall(door, msgspec.msgpack.encode(Hello(init.number, os.getpid())))
