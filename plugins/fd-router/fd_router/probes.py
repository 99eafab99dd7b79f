"""Asks every instance, again and again, whether it is ready and how much it has to do."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import aiohttp

from .instances import Fleet, Instance
from .options import RouterOptions

logger = logging.getLogger(__name__)

FAILURES = 3  # probes without an answer after which an instance is lost
MAX_ROLE_BYTES = 64 * 2**10
MAX_METRICS_BYTES = 4 * 2**20
_GAUGE = re.compile(
    rb"^fastdeploy:(num_requests_running|num_requests_waiting|num_requests_enqueued|"
    rb"free_gpu_block_num)(?:\{[^}\n]*\})? ([0-9.e+]{1,32})$",
    re.MULTILINE,
)


class Probes:
    """A task for each instance."""

    def __init__(
        self, fleet: Fleet, session: aiohttp.ClientSession, options: RouterOptions
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._options = options
        self._timeout = aiohttp.ClientTimeout(total=options.timing.probe_timeout_s)
        self._headers: dict[str, str] = {}
        if key := options.keys.instances or options.keys.own:
            self._headers["Authorization"] = f"Bearer {key}"
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts the tasks."""
        for instance in self._fleet.instances.values():
            self._tasks.append(asyncio.create_task(self._watch(instance)))

    async def stop(self) -> None:
        """Ends the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, instance: Instance) -> None:
        failures = 0
        while True:
            was = instance.ready
            try:
                instance.ready = await self._is_ready(instance)
                if instance.ready:
                    await self._read_load(instance)
                    await self._read_role(instance)
                failures = 0
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                failures += 1
                refused = isinstance(error, aiohttp.ClientConnectorError)
                if refused or failures >= FAILURES:
                    said = "refuses connections" if refused else "does not answer probes"
                    if was or failures == FAILURES:
                        # A new process behind this address will have nothing cached.
                        self._fleet.index.forget(instance.name)
                    instance.lose(said)
            if instance.ready != was:
                log = logger.info if instance.ready else logger.warning
                log("instance %s: %s", instance.name, instance.state)
            await asyncio.sleep(self._options.timing.probe_interval_s)

    async def _is_ready(self, instance: Instance) -> bool:
        async with self._session.get(
            f"{instance.url}/health/ready", timeout=self._timeout, allow_redirects=False
        ) as answer:
            if answer.status not in (200, 503):
                raise ValueError(f"/health/ready answers {answer.status}")
            body = await answer.content.read(4096)
        text = body.decode("utf-8", "replace")
        instance.state = "ready" if answer.status == 200 else f"not ready: {text[:200]!r}"
        return bool(answer.status == 200)

    async def _read_role(self, instance: Instance) -> None:
        """What it is for, and how others reach it. A server that does not know the route has no
        role; one that does not answer just now keeps what it had, and is as ready as any other."""
        said: object = None
        try:
            async with self._session.get(
                f"{instance.url}/kv_handover",
                timeout=self._timeout,
                allow_redirects=False,
                headers=self._headers,
            ) as answer:
                if answer.status == 200:
                    said = json.loads(await answer.content.read(MAX_ROLE_BYTES))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
            logger.debug("instance %s tells no role: %r", instance.name, error)
            return
        said = said if isinstance(said, dict) else {}
        role, instance.ticket = str(said.get("role", "")), str(said.get("ticket", ""))
        if role != instance.role:
            logger.info("instance %s: role %s", instance.name, role or "none")
            instance.role = role

    async def _read_load(self, instance: Instance) -> None:
        async with self._session.get(
            f"{instance.url}/metrics",
            timeout=self._timeout,
            allow_redirects=False,
            headers=self._headers,
        ) as answer:
            if answer.status != 200:
                return  # it serves another key's clients; what was sent there is known all the same
            parts: list[bytes] = []
            size = 0
            async for part in answer.content.iter_any():
                parts.append(part)
                size += len(part)
                if size > MAX_METRICS_BYTES:
                    raise ValueError(f"/metrics has more than {MAX_METRICS_BYTES} bytes")
        instance.metrics = b"".join(parts)
        found = {name: int(float(value)) for name, value in _GAUGE.findall(instance.metrics)}
        if b"num_requests_running" not in found:
            return
        waiting = found.get(b"num_requests_waiting", 0) + found.get(b"num_requests_enqueued", 0)
        # Blocks have sizes of their own; that none is free says enough.
        full = found.get(b"free_gpu_block_num") == 0
        instance.report(found[b"num_requests_running"], waiting, 0 if full else None)
