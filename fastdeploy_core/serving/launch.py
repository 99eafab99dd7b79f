"""Starts everything `fastdeploy serve` needs, in the order in which failures are cheapest.

Configuration, then the port, then plugins, then the engine (which loads the model), then the app.
Each start-up decision is one INFO line. Signals work from the first moment on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core import __version__
from fastdeploy_core.config import EngineConfig
from fastdeploy_core.config.arguments import (
    build_engine_config,
    build_server_config,
    normalise,
    of_scope,
)
from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.engine.client import AsyncEngine
from fastdeploy_core.engine.input import RequestLimits
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.grammar.compiler import GrammarCompiler
from fastdeploy_core.tokenizer import Tokenizer

from .app import create_app
from .server import ApiServer, bind_socket, url_of
from .state import check_parsers

if TYPE_CHECKING:
    from fastapi import FastAPI

    from fastdeploy_core.plugins.resolve import ResolvedPlugins
    from fastdeploy_core.types.engine import EngineInfo

logger = logging.getLogger(__name__)

GIB, MIB = 2**30, 2**20
_LOOPBACK = ("127.", "localhost", "::1")


def serve(values: Mapping[str, Any]) -> int:
    """Serve until a signal; returns the exit code. `values`: arguments as config/arguments.py knows."""
    values = normalise(values)
    engine_config = build_engine_config(of_scope(values, "engine"))
    server_config = build_server_config(values, engine_config)
    listener = bind_socket(server_config)
    try:
        return asyncio.run(_serve(engine_config, server_config, listener))
    finally:
        listener.close()


class _Signals:
    """SIGTERM and SIGINT go to whoever is in charge at the moment."""

    def __init__(self, first: Callable[[], object]) -> None:
        self.receiver = first
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: self.receiver())


async def _serve(
    engine_config: EngineConfig, server_config: ServerConfig, listener: socket.socket
) -> int:
    this = asyncio.current_task()
    signals = _Signals(this.cancel if this is not None else lambda: None)
    server: ApiServer | None = None
    try:
        async with running_app(engine_config, server_config) as (app, engine):
            server = ApiServer(app, server_config)
            signals.receiver = server.stop
            _log_ready(listener, server_config)
            death = asyncio.create_task(_watch(engine, server))
            try:
                await server.serve(sockets=[listener])
            finally:
                death.cancel()
    except asyncio.CancelledError:
        if server is not None:
            raise
        logger.info("stopped while starting")
        return 0
    logger.info("stopped")
    return server.exit_code


async def _watch(engine: AsyncEngine, server: ApiServer) -> None:
    server.engine_died(await engine.wait_dead())


@contextlib.asynccontextmanager
async def running_app(
    engine_config: EngineConfig, server_config: ServerConfig
) -> AsyncIterator[tuple[FastAPI, AsyncEngine]]:
    """An engine with an app around it; both are gone when the context ends."""
    started_at = time.monotonic()
    model = engine_config.model
    logger.info(
        "fastdeploy %s: model %s (%s, %s), context %d tokens",
        __version__,
        model.path.name,
        model.architecture,
        model.dtype,
        model.max_model_len,
    )
    check_parsers(server_config)
    tokenizer = await asyncio.to_thread(
        Tokenizer.load, model.tokenizer_path, chat_template=model.chat_template
    )
    resolved = await asyncio.to_thread(resolve_plugins, engine_config)
    async with contextlib.AsyncExitStack() as stack:
        engine = await AsyncEngine.start(engine_config, resolved)
        stack.push_async_callback(engine.close)
        limits = RequestLimits.of(engine_config, tokenizer, engine.info)
        compiler = GrammarCompiler.start(
            model.tokenizer_path,
            vocab_size=engine.info.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            config=engine_config.structured_outputs,
        )
        stack.callback(compiler.close)
        app = create_app(
            engine,
            tokenizer,
            server_config,
            limits=limits,
            compiler=compiler,
            routers=await asyncio.to_thread(plugin_routers, resolved),
        )
        _log_engine(engine.info, time.monotonic() - started_at)
        yield app, engine


def plugin_routers(resolved: ResolvedPlugins | None) -> list[tuple[str, Any]]:
    """Routes that plugins add (hook fd_api_routes), with the distribution they came from."""
    from fastdeploy_core.plugins.manager import hook_manager

    return [
        (answer.plugin.distribution, router)
        for answer in hook_manager(resolved).ask("fd_api_routes")
        for router in answer.value
    ]


def _log_engine(info: EngineInfo, seconds: float) -> None:
    # The engine process has logged its own decisions (info.report) already.
    logger.info(
        "engine ready after %.1f s, KV cache %s",
        seconds,
        _size(info.num_blocks * info.bytes_per_block),
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def _log_ready(listener: socket.socket, config: ServerConfig) -> None:
    if config.api_keys:
        logger.info(
            "%d api keys are accepted; every route but the probes needs one", len(config.api_keys)
        )
    elif config.uds is None and not config.host.startswith(_LOOPBACK):
        logger.warning(
            "no --api-key is set and the server listens on %s: everyone who reaches it may use it",
            config.host,
        )
    names = ", ".join(config.served_names)
    logger.info("serving %s at %s", names, url_of(listener, config))
