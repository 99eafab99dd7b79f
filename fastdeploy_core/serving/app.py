"""The API server's app around one engine: routes, error answers, and the middleware in front."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fastdeploy_core import __version__
from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.errors import FastDeployError
from fastdeploy_core.serving.front.occupancy import OwnOccupancy
from fastdeploy_core.serving.http.errors import ApiError, to_api_error
from fastdeploy_core.serving.http.middleware import Bodies, Guard, Hosts, Keys, route_path
from fastdeploy_core.serving.openai.routes import body_schemas, openai_router

from .plugin_routes import PluginRoutes, how_to_get, mount
from .service_routes import service_router
from .state import ServerState

if TYPE_CHECKING:
    from fastdeploy_core.contracts.model import MediaProcessor
    from fastdeploy_core.engine.client import AsyncEngine
    from fastdeploy_core.engine.input import RequestLimits
    from fastdeploy_core.grammar.compiler import GrammarCompiler
    from fastdeploy_core.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
stats_logger = logging.getLogger("fastdeploy_core.serving.stats")

LAG_PERIOD_S = 1.0
_AZURE = re.compile("^/openai/(v1/|deployments/[^/]+/)?")
# Nearly all calls of a server use these routes; their endpoints take the request and nothing else.
BUSY_PATHS = ("/v1/chat/completions", "/v1/completions")


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    config: ServerConfig,
    *,
    limits: RequestLimits,
    compiler: GrammarCompiler | None = None,
    plugins: Sequence[PluginRoutes] = (),
    occupancy: OwnOccupancy | None = None,
    media: MediaProcessor | None = None,
) -> FastAPI:
    """An app that serves this engine, with the routes that plugins add.

    The caller owns the engine and the grammar compiler and closes them. `app.state.server` is the
    ServerState.
    """
    state = ServerState(engine, tokenizer, config, limits, compiler, occupancy, media)
    app = FastAPI(
        title="FastDeploy",
        version=__version__,
        root_path=config.root_path,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan(state),
    )
    app.state.server = state
    openai = openai_router(state)
    app.include_router(openai)
    service = service_router(state)
    app.include_router(service)
    own = [("", openai), ("", service)]
    app.state.methods = _methods([*own, *((p.prefix, p.routes.router) for p in plugins)])
    _describe_bodies(app)
    shapes = mount(app, plugins)
    for kind in (ApiError, FastDeployError, ValidationError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _error_response)
    # Middleware is added innermost first; Guard comes last, so nothing runs before it.
    busy = [r for r in openai.routes if isinstance(r, APIRoute) and r.path in BUSY_PATHS]
    app.add_middleware(Shortcut, routes=busy)
    app.add_middleware(Bodies, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
    if config.api_keys or config.admin_key:
        app.add_middleware(Keys, keys=config.api_keys, admin_key=config.admin_key)
    # outside of Keys, because a browser's preflight request carries no key
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            # Clients for browsers send headers of their own (x-stainless-*). No header can do harm:
            # a browser sends no credentials along, so only a page that has a key can use it.
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Ignored-Fields", "Retry-After"],
            allow_credentials=False,
        )
    if config.allowed_hosts:
        app.add_middleware(Hosts, allowed=config.allowed_hosts)
    app.add_middleware(Guard, observe=state.metrics.answered, shapes=shapes)
    return app


class Shortcut:
    """Passes calls on busy routes directly to their endpoints and skips FastAPI's routing. FastAPI
    still describes these routes and serves other spellings of their paths."""

    def __init__(self, app: ASGIApp, routes: Sequence[APIRoute]) -> None:
        self.app = app
        self.routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        route = None
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self.routes.get(scope["path"])
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            response = await route.endpoint(request)
        except Exception as error:
            response = await _error_response(request, error)
        await response(scope, receive, send)


def _describe_bodies(app: FastAPI) -> None:
    """Add the bodies that routes parse themselves to the OpenAPI description."""
    describe = app.openapi

    def with_bodies() -> dict[str, Any]:
        schema = describe()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(body_schemas())
        return schema

    app.openapi = with_bodies  # type: ignore[method-assign]


async def _error_response(http: Request, error: Exception) -> Response:
    # raised by a plugin's route; routes of this project parse bodies themselves
    if isinstance(error, RequestValidationError):
        answer = to_api_error(ApiError(400, "the request does not fit this route"))
    else:
        answer = to_api_error(error)
    if "route" not in http.scope and (hint := how_to_get(http.method, route_path(http.scope))):
        answer = ApiError(404, hint)
    elif isinstance(error, HTTPException) and answer.status in (404, 405):
        if path := _route_meant(http):
            return Response(status_code=307, headers={"Location": path})
        answer = ApiError(answer.status, _no_route(http), headers=answer.headers)
    body = answer.encoded(http.scope)
    return Response(body, answer.status, headers=answer.headers, media_type="application/json")


def _methods(routers: Sequence[tuple[str, APIRouter]]) -> dict[str, set[str]]:
    """The methods of each path. Each router has a prefix."""
    methods: dict[str, set[str]] = {}
    for prefix, router in routers:
        for route in router.routes:
            if path := getattr(route, "path", ""):
                methods.setdefault(prefix + path, set()).update(getattr(route, "methods", ()))
    return methods


def _route_meant(http: Request) -> str:
    """The route to go to, where slashes are all that is wrong with a path, or it is one of Azure's,
    such as /openai/deployments/NAME/chat/completions."""
    path, query = re.sub("/+", "/", route_path(http.scope)).rstrip("/"), http.scope["query_string"]
    path = _AZURE.sub("/v1/", path)
    if path == route_path(http.scope) or path not in http.app.state.methods:
        return ""
    return str(
        http.scope.get("root_path", "") + path + ("?" + query.decode("latin-1") if query else "")
    )


def _no_route(http: Request) -> str:
    """What was asked, the route that was probably meant, and those that there are."""
    methods: dict[str, set[str]] = http.app.state.methods
    asked = f"there is no route {http.method} {route_path(http.scope)[:200]} here"
    allowed = methods.get(getattr(http.scope.get("route"), "path", ""))
    if allowed:
        return f"{asked}; this path answers {', '.join(sorted(allowed))}"
    near = difflib.get_close_matches(route_path(http.scope)[:200], methods, n=1, cutoff=0.75)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{asked}{meant}; there are: {', '.join(sorted(methods))}"


def _lifespan(state: ServerState) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(_watch_lag(state))]
        if state.config.log_stats:
            tasks.append(asyncio.create_task(_log_stats(state)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            state.close()

    return lifespan


async def _watch_lag(state: ServerState) -> None:
    """Measure how late the event loop wakes, which shows what blocks it."""
    while True:
        due = time.monotonic() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        state.metrics.loop_lag.set(max(0.0, time.monotonic() - due))


async def _log_stats(state: ServerState) -> None:
    """Log one line per interval while there is activity."""
    before = (time.monotonic(), 0, 0)
    was_idle = True
    while True:
        await asyncio.sleep(state.config.stats_interval_s)
        try:
            stats = await state.engine.stats()
        except FastDeployError as error:
            stats_logger.warning("engine statistics are missing: %s", error)
            continue
        now = (time.monotonic(), stats.prompt_tokens_total, stats.generation_tokens_total)
        seconds = now[0] - before[0]
        prompt, generated = (max(0, now[i] - before[i]) / seconds for i in (1, 2))
        before = now
        idle = not state.admission.total and not prompt and not generated
        if idle and was_idle:
            continue
        was_idle = idle
        used = 100 * stats.num_blocks_used / max(1, stats.num_blocks_total)
        hits = 100 * stats.prefix_hit_tokens_total / max(1, stats.prefix_query_tokens_total)
        values = {name: getattr(stats, name) for name in stats.__struct_fields__}
        stats_logger.info(
            "prompt %(prompt).1f tokens/s, generation %(generated).1f tokens/s, running "
            "%(num_running)d, waiting %(num_waiting)d, queued %(num_queued)d, KV blocks "
            "%(num_blocks_used)d/%(num_blocks_total)d (%(used).1f %%), prefix hits %(hits).1f %%, "
            "preemptions %(preemptions_total)d",
            {**values, "prompt": prompt, "generated": generated, "used": used, "hits": hits},
        )
