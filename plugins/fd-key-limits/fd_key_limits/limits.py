"""Holds each key to its limits, between the server's routes and its engine.

A limit per minute is a bucket that holds a minute's worth and fills evenly, so a key that was idle
may use a minute's worth at once. A request enters when its bucket holds its prompt; what is
generated is taken as it comes, so the bucket may owe, and the key waits until that is paid.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from fastdeploy_core.errors import ConfigError, QueueFull
from fastdeploy_core.types import Request, RequestOutputDelta

from .file import Limits, read

logger = logging.getLogger(__name__)

MINUTE_S = 60.0
LOOK_S = 1.0  # between two looks at the file
RUNNING_RETRY_S = 1.0


class Bucket:
    """A limit per minute."""

    def __init__(self, now_s: float) -> None:
        self.used = 0.0  # below the limit: there is room
        self._seen_s = now_s

    def wait_s(self, amount: float, limit: int, now_s: float) -> float:
        """Seconds until so much fits; more than fits in a minute fits into an empty bucket."""
        self.used = max(0.0, self.used - (now_s - self._seen_s) * limit / MINUTE_S)
        self._seen_s = now_s
        return max(0.0, (self.used + min(amount, limit) - limit) * MINUTE_S / limit)


class Account:
    """What one key uses. It outlives changes of the file."""

    def __init__(self, now_s: float) -> None:
        self.requests, self.tokens = Bucket(now_s), Bucket(now_s)
        self.running = 0

    def enter(self, limits: Limits, num_tokens: int, now_s: float) -> None:
        """Let a request in; QueueFull names the limit that forbids it."""
        running, requests = limits.running_requests, limits.requests_per_minute
        tokens = limits.tokens_per_minute
        if running is not None and self.running >= running:
            raise _refusal(limits, "running_requests", running, RUNNING_RETRY_S)
        if requests is not None and (wait_s := self.requests.wait_s(1, requests, now_s)) > 0:
            raise _refusal(limits, "requests_per_minute", requests, wait_s)
        if tokens is not None and (wait_s := self.tokens.wait_s(num_tokens, tokens, now_s)) > 0:
            raise _refusal(limits, "tokens_per_minute", tokens, wait_s)
        self.running += 1
        # What is used without a limit must not count once the file has one.
        self.requests.used = 0.0 if requests is None else self.requests.used + 1
        self.tokens.used = 0.0 if tokens is None else self.tokens.used + num_tokens


def _refusal(limits: Limits, word: str, limit: int, wait_s: float) -> QueueFull:
    logger.info("key [%s] has reached %s = %d", limits.name, word, limit)
    return QueueFull(
        f"this key's limit {word} = {limit} is reached; try again in {wait_s:.0f} s",
        retry_after_s=wait_s,
    )


class KeyLimits:
    """The file's limits, read again when it changes. Belongs to one event loop."""

    def __init__(self, path: str, num_api_servers: int) -> None:
        if num_api_servers > 1:
            raise ConfigError(
                "--api-key-limits counts in one API server, --api-server-count is "
                f"{num_api_servers}; use one, or a server for each instance behind a router"
            )
        self._path = Path(path)
        self._limits = read(self._path)
        self._stamp = self._stamp_of()
        self._looked_s = time.monotonic()
        self._accounts: dict[str, Account] = {}

    def around(self, engine: Any) -> LimitedEngine:
        """The engine, for the server's routes."""
        return LimitedEngine(engine, self)

    def enter(self, tenant: str, num_tokens: int) -> Account:
        """Let a request of that key in; QueueFull if a limit forbids it."""
        now_s = time.monotonic()
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self._look()
        limits = self._limits.get(tenant) or self._limits[""]
        account = self._accounts.setdefault(tenant, Account(now_s))
        account.enter(limits, num_tokens, now_s)
        return account

    def _look(self) -> None:
        stamp = self._stamp_of()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._limits = read(self._path)
        except ConfigError as error:
            logger.error("%s; the limits stay as they were", error)
        else:
            logger.info("%s was read again: %d sections", self._path, len(self._limits))

    def _stamp_of(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


class LimitedEngine:
    """An AsyncEngine whose requests are counted."""

    def __init__(self, engine: Any, limits: KeyLimits) -> None:
        self._engine, self._limits = engine, limits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, request: Request, chunk_tokens: int = 1
    ) -> AsyncGenerator[RequestOutputDelta, None]:
        """As AsyncEngine.generate; QueueFull also when a limit of the request's key is reached."""
        num_tokens = len(request.prompt_token_ids)
        self._engine.check_admission(num_tokens)  # what is refused for all costs no key anything
        account = self._limits.enter(request.tenant, num_tokens)
        deltas = self._engine.generate(request, chunk_tokens)
        try:
            async for delta in deltas:
                account.tokens.used += sum(len(s.token_ids) for s in delta.sequences)
                yield delta
        finally:
            account.running -= 1
            await deltas.aclose()
