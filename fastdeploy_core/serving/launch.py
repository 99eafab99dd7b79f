"""Starts everything `fastdeploy serve` needs; what is cheapest to fail comes first.

Configuration, then the port, then plugins, then the engine (which loads the model), then the app.
Each start-up decision is one INFO line. Signals work from the beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
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
from fastdeploy_core.engine.media import media_processor
from fastdeploy_core.engine.processes.child import stop_signals
from fastdeploy_core.parsers.answer import parser_for, parser_named
from fastdeploy_core.plugins.checkpoints import find_model
from fastdeploy_core.plugins.drivers import find, find_part, find_soon, part
from fastdeploy_core.serving.http import event_loop
from fastdeploy_core.serving.http.listening import bind_socket, url_of

from .asking import Plugins

# The web framework is imported while the engine starts, not before.
if TYPE_CHECKING:
    from fastapi import FastAPI

    from fastdeploy_core.contracts.model import MediaProcessor
    from fastdeploy_core.plugins.resolve import ResolvedPlugins
    from fastdeploy_core.serving.front.door import FrontDoor
    from fastdeploy_core.serving.front.occupancy import OwnOccupancy
    from fastdeploy_core.tokenizer import Tokenizer
    from fastdeploy_core.types.engine import EngineInfo

    from .plugin_routes import PluginRoutes
    from .server import ApiServer

logger = logging.getLogger(__name__)

GIB, MIB = 2**30, 2**20
_LOOPBACK = ("127.", "localhost", "::1")


def serve(values: Mapping[str, Any]) -> int:
    """Serve until a signal; returns the exit code. `values`: arguments in any spelling of
    config/arguments.py."""
    values = normalise(values)
    engine_config = build_engine_config(of_scope(values, "engine"), find_model)
    server_config = _with_parsers(build_server_config(values, engine_config), engine_config)
    if server_config.trust_request_chat_template:
        find_part("request-templates", "--trust-request-chat-template")  # before a model is loaded
    listener = bind_socket(server_config)
    try:
        if server_config.api_server_count > 1:
            return _serve_by_many(engine_config, server_config, listener)
        return event_loop.run(_serve(engine_config, server_config, listener))
    finally:
        listener.close()


def _serve_by_many(
    engine_config: EngineConfig, server_config: ServerConfig, listener: socket.socket
) -> int:
    """Run API servers in processes of their own; this one only supervises them and engines."""
    front_ends = part("api-servers", "--api-server-count above 1")
    _log_model(engine_config)
    _each_parser(server_config, find)  # PluginNotFound, before a model is loaded
    started_at = time.monotonic()

    def on_ready() -> None:
        count = server_config.api_server_count
        logger.info("%d API servers ready after %.1f s", count, time.monotonic() - started_at)
        _log_ready(listener, server_config)

    plugins = Plugins(engine_config)
    status: int = front_ends(engine_config, server_config, plugins, listener).run(on_ready)
    logger.info("stopped")
    return status


class _Signals:
    """Sends what asks the server to end to the part that handles it at the moment."""

    def __init__(self, first: Callable[[], object]) -> None:
        self.receiver = first
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, lambda: self.receiver())


async def _serve(
    engine_config: EngineConfig, server_config: ServerConfig, listener: socket.socket
) -> int:
    this = asyncio.current_task()
    signals = _Signals(this.cancel if this is not None else lambda: None)
    server: ApiServer | None = None
    try:
        async with running_app(engine_config, server_config) as (app, engine):
            from .server import ApiServer

            server = ApiServer(app, server_config)
            gc.freeze()  # objects made so far stay; collecting them again would pause all streams
            signals.receiver = server.stop
            death = asyncio.create_task(watch(engine, server))
            opening = asyncio.create_task(_open(server, app, server_config, listener))
            try:
                await server.serve(sockets=[])
            finally:
                death.cancel()
                opening.cancel()
                if opening.done() and not opening.cancelled():
                    opening.result().close()
    except asyncio.CancelledError:
        if server is not None:
            raise
        logger.info("stopped while starting")
        return 0
    logger.info("stopped")
    return server.exit_code


async def _open(
    server: ApiServer, app: FastAPI, config: ServerConfig, listener: socket.socket
) -> FrontDoor:
    """Accept connections as soon as the app runs."""
    from fastdeploy_core.serving.front.door import FrontDoor

    while not server.started:
        await asyncio.sleep(0.005)
    state, loop = app.state.server, asyncio.get_running_loop()
    door = FrontDoor(listener, config, state.engine.health, state.occupancy.table)

    def hand_over(connection: socket.socket) -> None:
        try:
            loop.call_soon_threadsafe(server.adopt, connection)
        except RuntimeError as error:
            raise OSError("it has ended") from error

    door.add(0, hand_over)
    door.start()
    _log_ready(listener, config)
    return door


async def watch(engine: AsyncEngine, server: ApiServer) -> None:
    """End the server when the engine has ended for good."""
    server.engine_died(await engine.wait_dead())


@contextlib.asynccontextmanager
async def running_app(
    engine_config: EngineConfig, server_config: ServerConfig
) -> AsyncIterator[tuple[FastAPI, AsyncEngine]]:
    """An engine with an app around it; both end with the context."""
    started_at = time.monotonic()
    _log_model(engine_config)
    _each_parser(server_config, find_soon)  # PluginNotFound, before a model is loaded
    plugins = Plugins(engine_config)
    starting = AsyncEngine.start(engine_config, plugins.resolved)
    made = app_around(starting, engine_config, server_config, plugins.resolved)
    async with made as (app, engine):
        num_engines = engine_config.parallel.data_parallel_size
        _log_engine(engine.info, num_engines, time.monotonic() - started_at)
        yield app, engine


@contextlib.asynccontextmanager
async def app_around(
    starting: Coroutine[Any, Any, AsyncEngine],
    engine_config: EngineConfig,
    server_config: ServerConfig,
    resolved: Future[ResolvedPlugins],
    occupancy: OwnOccupancy | None = None,
) -> AsyncIterator[tuple[FastAPI, AsyncEngine]]:
    """Make what the app needs while the engine starts. occupancy: of one of several API servers."""
    model = engine_config.model
    async with contextlib.AsyncExitStack() as stack:
        engine_task = asyncio.create_task(starting)
        try:
            path = server_config.api_key_limits
            limits_of_keys = path and part("key-limits", "--api-key-limits")(path, occupancy)
            tokenizer, plugins, media = await asyncio.to_thread(
                _prepare_app, engine_config, server_config, resolved
            )
        except BaseException:
            engine_task.cancel()
            await asyncio.gather(engine_task, return_exceptions=True)
            raise
        engine = await engine_task
        stack.push_async_callback(engine.close)
        from fastdeploy_core.engine.input import RequestLimits
        from fastdeploy_core.grammar.compiler import GrammarCompiler

        from .app import create_app

        limits = RequestLimits.of(engine_config, tokenizer, engine.info)
        compiler = GrammarCompiler.start(
            model.tokenizer_path,
            resolved.result().grammar,
            vocab_size=engine.info.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            config=engine_config.structured_outputs,
        )
        stack.callback(compiler.close)
        app = create_app(
            limits_of_keys.around(engine) if limits_of_keys else engine,
            tokenizer,
            server_config,
            limits=limits,
            compiler=compiler,
            plugins=plugins,
            occupancy=occupancy,
            media=media,
        )
        app.state.decisions = resolved.result().report()  # why each plugin was chosen
        if engine_config.lora is not None:
            app.state.server.adapters = part("lora-server", "--enable-lora")(engine_config)
        yield app, engine


def _with_parsers(config: ServerConfig, engine: EngineConfig) -> ServerConfig:
    """Parsers that the operator did not name are those of the model's type."""
    model_type = str(engine.model.hf_config.get("model_type", ""))
    chosen: dict[str, Any] = {
        "reasoning_parser": parser_for("reasoning_parser", config.reasoning_parser, model_type),
        "tool_call_parser": parser_for("tool_parser", config.tool_call_parser, model_type),
    }
    for field, name in chosen.items():
        if name and name != getattr(config, field):
            flag = f"--{field.replace('_', '-')}"
            logger.info("%s %s: chosen by the model's type; name another one, or none", flag, name)
    return replace(config, **chosen)


def _each_parser(config: ServerConfig, use: Callable[[str, str], object]) -> None:
    """Call use(kind, name) for every parser that the operator named."""
    kinds = {"reasoning_parser": config.reasoning_parser, "tool_parser": config.tool_call_parser}
    for kind, name in kinds.items():
        if name:
            use(kind, name)


def _log_model(config: EngineConfig) -> None:
    model = config.model
    what = model.path.name, model.architecture, model.dtype, model.max_model_len
    logger.info("fastdeploy %s: model %s (%s, %s), context %d tokens", __version__, *what)


def _prepare_app(
    config: EngineConfig, server_config: ServerConfig, resolved: Future[ResolvedPlugins]
) -> tuple[Tokenizer, list[PluginRoutes], MediaProcessor | None]:
    """The slow parts of an app that need no engine."""
    model = config.model
    for module in (".app", ".server", "..grammar.compiler"):
        importlib.import_module(module, __package__)
    from fastdeploy_core.tokenizer import Tokenizer

    from .plugin_routes import plugin_routes

    tokenizer = Tokenizer.load(
        model.tokenizer_path,
        chat_template=model.chat_template,
        trust_special_tokens=model.trust_special_tokens,
    )
    media = media_processor(config, resolved.result())
    _each_parser(server_config, parser_named)  # so that the app finds them imported
    return tokenizer, plugin_routes(resolved.result()), media


def _log_engine(info: EngineInfo, num_engines: int, seconds: float) -> None:
    # The engine process has already logged its own decisions (info.report).
    num_bytes = info.num_blocks * info.bytes_per_block + info.bounded_bytes
    size = f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
    count = f"{num_engines} engines" if num_engines > 1 else "engine"
    logger.info("%s ready after %.1f s, KV cache %s", count, seconds, size)


def _log_ready(listener: socket.socket, config: ServerConfig) -> None:
    if count := len(config.api_keys):
        logger.info("%d api keys are accepted; every route but the probes needs one", count)
    elif config.uds is None and not config.host.startswith(_LOOPBACK):
        logger.warning(
            "no --api-key is set and the server listens on %s: everyone who reaches it may use it",
            config.host,
        )
    elif config.uds is None:
        logger.info("only this machine can connect; --api-key or --host opens the server to others")
    logger.info("serving %s at %s", ", ".join(config.served_names), url_of(listener, config))
