"""The answers to health probes, for routes and for the front door."""

from __future__ import annotations

from fastdeploy_core.serving.http.errors import sanitise
from fastdeploy_core.types.engine import EngineHealth


def answer_probe(path: str, health: EngineHealth, draining: bool) -> tuple[int, dict[str, str]]:
    """Status and body for a probe."""
    if path == "/health/live":
        return 200, {"status": "live"}
    if path == "/health/ready":
        if draining or health.draining:
            return 503, {"status": "draining"}
        return _answer(health.alive and health.ready, "ready", health.reason)
    # A draining engine still makes progress, so it is healthy; only /health/ready answers 503.
    return _answer(health.alive and (health.ready or health.draining), "healthy", health.reason)


def _answer(well: bool, word: str, reason: str) -> tuple[int, dict[str, str]]:
    if well:
        return 200, {"status": word}
    return 503, {"status": f"not {word}", "reason": sanitise(reason)}
