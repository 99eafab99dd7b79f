"""Skeleton, being filled in: AsyncEngine (for serving) and LocalEngine (for the offline API)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.types import Request, RequestOutputDelta
from fastdeploy_core.types.engine import EngineHealth, EngineInfo, EngineStats

if TYPE_CHECKING:
    from fastdeploy_core.plugins.resolve import ResolvedPlugins


class AsyncEngine:
    """An engine in a process of its own, as an event loop uses it."""

    info: EngineInfo

    @classmethod
    async def start(cls, config: EngineConfig, resolved: ResolvedPlugins) -> AsyncEngine:
        """Spawn the engine process and wait until it is ready; WorkerError or ConfigError carry
        the child's one-line reason."""
        raise NotImplementedError

    def check_admission(self, num_tokens: int = 0) -> None:
        """Raise QueueFull or WorkerError at once if a request put now would be refused; cheap, to be
        called before tokenizing."""
        raise NotImplementedError

    def generate(self, request: Request) -> AsyncIterator[RequestOutputDelta]:
        """Deltas until one has finished=True. Raises QueueFull, RequestTimeout, WorkerError,
        InvalidRequest; leaving the iterator (aclose) aborts the request."""
        raise NotImplementedError

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gets a last delta with finish_reason abort. Idempotent."""

    def health(self) -> EngineHealth:
        """Callable from any thread, never blocks."""
        raise NotImplementedError

    async def stats(self) -> EngineStats:
        """Asked of the engine process; WorkerError when it does not answer within five seconds."""
        raise NotImplementedError

    async def wait_dead(self) -> str:
        """Return, with the reason, once the engine is dead and will not be restarted."""
        raise NotImplementedError

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait for the running ones up to grace_s, fail the rest."""

    async def close(self) -> None:
        """End the engine process and everything below it; idempotent."""


class LocalEngine:
    """An engine inside this process, stepped by its caller. Not thread-safe."""

    info: EngineInfo

    def __init__(self, config: EngineConfig, resolved: ResolvedPlugins) -> None:
        raise NotImplementedError

    def add(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest or RequestTooLong."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests without a further delta; unknown ids are ignored."""

    def step(self) -> list[RequestOutputDelta]:
        """Run one step; may return nothing even though work is left."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Whether an unfinished request is left."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """Gauges and counters of this engine."""
        raise NotImplementedError

    def close(self) -> None:
        """End worker processes, give the device back; idempotent."""
