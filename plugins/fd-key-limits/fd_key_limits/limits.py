"""Holds each key to its limits, between the server's routes and its engine.

A limit per minute is a bucket that holds a minute's worth and fills evenly, so a key that was idle
may use a minute's worth at once. A request enters when its bucket holds its prompt; what is
generated is taken as it comes, so the bucket may owe, and the key waits until that is paid.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

from fastdeploy_core.errors import ConfigError, QueueFull
from fastdeploy_core.types import Request, RequestOutputDelta

from .accounts import Accounts, SharedAccounts
from .file import read

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the file


class KeyLimits:
    """The file's limits, read again when it changes. Belongs to one event loop."""

    def __init__(self, path: str, occupancy: Any = None) -> None:
        """occupancy: OwnOccupancy of one of several API servers, which count together."""
        self._path = Path(path)
        self._limits = read(self._path)
        self._stamp = self._stamp_of()
        self._looked_s = time.monotonic()
        self.accounts: Accounts | SharedAccounts = Accounts()
        if occupancy is not None and occupancy.table.path is not None:
            shared, table = occupancy.table.path.with_name("key-limits"), occupancy.table
            self.accounts = SharedAccounts(shared, occupancy.number, table.count)

    def around(self, engine: Any) -> LimitedEngine:
        """The engine, for the server's routes."""
        return LimitedEngine(engine, self)

    def enter(self, tenant: str, num_tokens: int) -> None:
        """Let a request of that key in; QueueFull if a limit forbids it."""
        now_s = time.monotonic()
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self._look()
        limits = self._limits.get(tenant) or self._limits[""]
        try:
            with self.accounts.open(tenant) as account:
                account.enter(limits, num_tokens, time.monotonic())
        except QueueFull as refusal:
            logger.info("key [%s]: %s", limits.name, refusal)
            raise

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
        self._limits.enter(request.tenant, num_tokens)
        opened = partial(self._limits.accounts.open, request.tenant)
        deltas = self._engine.generate(request, chunk_tokens)
        try:
            async for delta in deltas:
                with opened() as account:
                    account.tokens.used += sum(len(s.token_ids) for s in delta.sequences)
                yield delta
        finally:
            with opened() as account:
                account.running -= 1
            await deltas.aclose()
