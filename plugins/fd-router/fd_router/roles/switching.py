"""Puts a RoleController's decisions into force: the share for the router itself, roles by the route
/kv_handover of instances. Every change is a log line and shows in the metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from pathlib import Path
from typing import Final

import aiohttp

from fastdeploy_core.errors import ConfigError
from fd_router.instances import PREFILL, Fleet, Instance
from fd_router.metrics import RouterMetrics
from fd_router.prefill import Prefill

from .controller import Decision, Goals, Member, RoleController, Work

logger = logging.getLogger(__name__)

SWITCH_S: Final = 130.0  # handovers under way end first; the route itself gives up after 120
_COUNTER = re.compile(
    rb"^fastdeploy:(engine_steps|generation_tokens|prefix_cache_query_tokens|"
    rb"prefix_cache_token_num|engine_model_seconds)_total\{model_name=\"[^\"\n]*\"\} "
    rb"([0-9.e+-]{1,32})$",
    re.MULTILINE,
)


def read_secret() -> str:
    """What instances share, which changing a role takes; ConfigError where there is none."""
    if given := os.environ.get("FD_KV_SECRET", ""):
        return given
    path = Path(os.environ.get("FD_CACHE_DIR", "~/.cache/fastdeploy")).expanduser() / "kv-secret"
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(
            f"--slo-tpot changes roles, which takes the secret that instances share: {path}: "
            f"{error.strerror}; set FD_KV_SECRET as the instances have it"
        ) from None


def work_of(instance: Instance) -> Work:
    """What it has done, by its newest metrics."""
    found = {name.decode(): float(value) for name, value in _COUNTER.findall(instance.metrics)}
    asked = found.get("prefix_cache_query_tokens", 0.0)
    return Work(
        steps=found.get("engine_steps", 0.0),
        generated=found.get("generation_tokens", 0.0),
        computed=asked - found.get("prefix_cache_token_num", 0.0),
        seconds=found.get("engine_model_seconds", 0.0),
        queued=float(instance.queued_tokens),
    )


class RoleSwitching:
    """A task of the router's."""

    def __init__(
        self,
        fleet: Fleet,
        prefill: Prefill,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        goals: Goals,
    ) -> None:
        """ConfigError without a secret."""
        self._fleet, self._prefill, self._session = fleet, prefill, session
        self._metrics, self._goals = metrics, goals
        self._controller, self._secret = RoleController(goals), read_secret()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._goals.interval_s)
            able = [
                one
                for one in self._fleet.instances.values()
                if one.ready and one.ticket and not one.draining
            ]
            members = [Member(one.name, one.role == PREFILL, work_of(one)) for one in able]
            decision = self._controller.decide(time.monotonic(), members)
            if decision is not None:
                await self._follow(decision)

    async def _follow(self, decision: Decision) -> None:
        metrics, share = self._metrics, decision.mixed_share
        metrics.role_demand.labels("prefill").set(decision.prefill_demand)
        metrics.role_demand.labels("decode").set(decision.decode_demand)
        metrics.mixed_share.set(share)
        if share != self._prefill.mixed_share:
            logger.info(
                "roles: %.0f %% of prompts are not handed over: %s", 100 * share, decision.reason
            )
            self._prefill.mixed_share = share
        if decision.change is not None:
            name, is_prefill = decision.change
            role = PREFILL if is_prefill else "decode"
            logger.info("roles: instance %s becomes %s: %s", name, role, decision.reason)
            outcome = await self._switch(self._fleet.instances[name], role)
            metrics.role_changes.labels(name, role, outcome).inc()
            if outcome != "200":
                logger.warning("roles: instance %s did not become %s: %s", name, role, outcome)

    async def _switch(self, instance: Instance, role: str) -> str:
        """The status of the answer, or what went wrong."""
        try:
            async with self._session.post(
                f"{instance.url}/kv_handover",
                json={"role": role},
                headers={"X-KV-Secret": self._secret},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=SWITCH_S),
            ) as answer:
                await answer.read()
                return str(answer.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__
