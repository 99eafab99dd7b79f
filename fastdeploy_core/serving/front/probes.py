"""The answers to health probes, for routes and for the front door."""

from __future__ import annotations

from typing import Any

from fastdeploy_core.serving.http.errors import sanitise
from fastdeploy_core.types.engine import CommonHealth, EngineHealth

from .occupancy import Occupancy


def answer_probe(path: str, health: EngineHealth, table: Occupancy) -> tuple[int, dict[str, Any]]:
    """Status and body for a probe; the state of each engine is in it if there are several."""
    if path == "/health/live":
        return 200, {"status": "live"}
    status, body = _answer_about_engine(path, health, table)
    if isinstance(health, CommonHealth):
        body["engines"] = {str(n): _state(each) for n, each in health.engines.items()}
    return status, body


def _answer_about_engine(
    path: str, health: EngineHealth, table: Occupancy
) -> tuple[int, dict[str, Any]]:
    if path == "/health/ready":
        if table.is_draining or health.draining:
            return 503, {"status": "draining"}
        if table.is_paused(health.num_restarts):
            return 503, {"status": "paused"}
        return _answer(health.alive and health.ready, "ready", health.reason)
    # A draining engine still makes progress, so it is healthy; only /health/ready answers 503.
    return _answer(health.alive and (health.ready or health.draining), "healthy", health.reason)


def _state(engine: EngineHealth) -> str:
    if engine.ready:
        return "ready"
    return f"not ready: {sanitise(engine.reason)}" if engine.reason else "not ready"


def _answer(well: bool, word: str, reason: str) -> tuple[int, dict[str, Any]]:
    if well:
        return 200, {"status": word}
    return 503, {"status": f"not {word}", "reason": sanitise(reason)}
