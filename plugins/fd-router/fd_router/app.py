"""The router as an HTTP application: routes, keys, limits, draining."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import signal
import time
from collections.abc import Awaitable, Callable

import aiohttp
import zmq.asyncio
from aiohttp import web

from fastdeploy_core.errors import ConfigError

from .asked import read_request
from .cached.follower import Follower
from .instances import Fleet, Instance
from .metrics import RouterMetrics
from .options import RouterOptions
from .prefill import Prefill
from .probes import Probes
from .proxy import RETRY_AFTER, Proxy, error_response
from .roles.switching import RoleSwitching

logger = logging.getLogger(__name__)

BODY_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 2.0
# Shorter than instances keep a connection, so that none is used while it is being closed.
KEEP_ALIVE_S = 2.0
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """One router process."""

    def __init__(self, options: RouterOptions) -> None:
        self._options = options
        self._fleet = Fleet(options.instances, options.policy)
        self._metrics = RouterMetrics()
        self._draining = False
        self._in_flight = 0
        self._known = dict(self._fleet.instances)  # those that compute prompts included
        self._proxy: Proxy

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then lets running answers end."""
        options = self._options
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            prefill = Prefill(session, options.prefill, self._metrics, self._fleet)
            probes = [Probes(fleet, session, options) for fleet in (self._fleet, prefill.fleet)]
            self._known |= prefill.fleet.instances
            roles: RoleSwitching | None = None
            if options.goals is not None:
                roles = RoleSwitching(self._fleet, prefill, session, self._metrics, options.goals)
            self._proxy = Proxy(self._fleet, session, options, self._metrics, prefill)
            runner = web.AppRunner(
                self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
            )
            await runner.setup()
            site = web.TCPSite(runner, options.host, options.port)
            try:
                await site.start()
            except OSError as error:
                raise ConfigError(
                    f"cannot listen at {options.host}:{options.port}: {error.strerror or error}; "
                    "choose another --port"
                ) from None
            for group in probes:
                group.start()
            context = zmq.asyncio.Context()
            tasks = [
                asyncio.create_task(Follower(context, self._fleet.events, one, number).run())
                for number, one in enumerate(options.kv_events)
            ]
            if roles is not None:
                tasks.append(asyncio.create_task(roles.run()))
            host, port = runner.addresses[0][:2]
            logger.info(
                "routing at http://%s:%d to %d instances", host, port, len(self._fleet.instances)
            )
            await _stop_signal()
            await self._drain()
            for group in probes:
                await group.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            context.destroy(0)
            await runner.cleanup()

    async def _drain(self) -> None:
        self._draining = True
        logger.info("draining: %d requests are being answered", self._in_flight)
        try:
            async with asyncio.timeout(self._options.timing.drain_timeout_s):
                while self._in_flight:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            logger.warning("%d requests are cut off", self._in_flight)

    def _app(self) -> web.Application:
        app = web.Application(
            client_max_size=self._options.max_body_bytes, middlewares=[self._guard]
        )
        for path in OPEN_PATHS:
            app.router.add_get(path, self._health)
        app.router.add_get("/metrics", self._show_metrics)
        if self._options.keys.admin:
            app.router.add_get("/admin/instances", self._list)
            app.router.add_post("/admin/instances/{name}/{action:drain|resume}", self._set_draining)
        app.router.add_route("*", "/v1/{rest:.+}", self._forward)
        app.router.add_post("/tokenize", self._forward)
        app.router.add_post("/detokenize", self._forward)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keys, and errors as OpenAI's API has them."""
        keys = self._options.keys
        key = keys.admin if request.path.startswith("/admin") else keys.own
        if key and request.path not in OPEN_PATHS and not _has_key(request, key):
            message = "a valid key is needed: send it as Authorization: Bearer KEY"
            return error_response(401, message, {"WWW-Authenticate": "Bearer"})
        self._in_flight += 1
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            limit = self._options.max_body_bytes
            return error_response(413, f"the body is too large; at most {limit} bytes are taken")
        except web.HTTPException as error:
            return error_response(error.status, f"{error.reason}: {request.method} {request.path}")
        except ConnectionResetError:  # the client left
            raise
        except Exception:
            logger.exception("a request failed in the router")
            return error_response(500, "the router failed; its log says why")
        finally:
            self._in_flight -= 1

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if self._draining:
            return error_response(503, "this router is stopping", RETRY_AFTER)
        if ".." in request.path or "//" in request.path:
            return error_response(400, "the path is not plain; write it without .. and //")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await request.read()
        except TimeoutError:
            return error_response(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s")
        try:
            asked = read_request(request.path_qs, request.headers, body)
        except ValueError as error:
            return error_response(400, str(error))
        return await self._proxy.forward(request, asked)

    async def _health(self, request: web.Request) -> web.Response:
        if request.path == "/health/live":
            return web.json_response({"status": "live"})
        usable = self._fleet.num_usable
        well = usable > 0 and not (self._draining and request.path == "/health/ready")
        body = {"status": "draining" if self._draining else "ready" if well else "no instance"}
        return web.json_response({**body, "instances": usable}, status=200 if well else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.render(self._fleet),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response([_describe(one) for one in self._known.values()])

    async def _set_draining(self, request: web.Request) -> web.Response:
        """Drain: new requests go elsewhere, running ones end. Resume takes it back."""
        name = request.match_info["name"]
        one = self._known.get(name)
        if one is None:
            known = ", ".join(self._known)
            return error_response(404, f"no instance {name!r}; there are: {known}")
        one.draining = request.match_info["action"] == "drain"
        logger.info("instance %s: %s", name, "draining" if one.draining else "resumed")
        return web.json_response(_describe(one))


def _describe(one: Instance) -> dict[str, object]:
    return {
        "name": one.name,
        "url": one.url,
        "state": one.state,
        "role": one.role,
        "draining": one.draining,
        "breaker": one.breaker.state(time.monotonic()),
        "requests_in_flight": len(one.calls),
    }


def _has_key(request: web.Request, key: str) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    digests = [
        hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        for text in (given.strip(), key)
    ]
    return hmac.compare_digest(*digests) and scheme.lower() == "bearer"


async def _stop_signal() -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]  # nohup
    for number in (signal.SIGTERM, signal.SIGINT, *hangup):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
