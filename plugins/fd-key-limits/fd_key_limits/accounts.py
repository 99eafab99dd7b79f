"""What each key uses: in this process, or in memory that all API servers of one port share."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastdeploy_core.errors import QueueFull

from .file import TENANT_DIGITS, Limits

MINUTE_S = 60.0
RUNNING_RETRY_S = 1.0
MAX_KEYS = 16_384  # of one server; rows that nobody has used take no memory


class Bucket:
    """A limit per minute."""

    def __init__(self, seen_s: float, used: float = 0.0) -> None:
        self.used = used  # below the limit: there is room
        self.seen_s = seen_s

    def wait_s(self, amount: float, limit: int, now_s: float) -> float:
        """Seconds until so much fits; more than fits in a minute fits into an empty bucket."""
        self.used = max(0.0, self.used - (now_s - self.seen_s) * limit / MINUTE_S)
        self.seen_s = now_s
        return max(0.0, (self.used + min(amount, limit) - limit) * MINUTE_S / limit)


class Account:
    """What one key uses. It outlives changes of the file."""

    def __init__(self, requests: Bucket, tokens: Bucket) -> None:
        self.requests, self.tokens = requests, tokens
        self.running = self.running_elsewhere = 0  # requests here, and in other API servers

    @classmethod
    def at(cls, now_s: float) -> Account:
        """Of a key that has used nothing."""
        return cls(Bucket(now_s), Bucket(now_s))

    def enter(self, limits: Limits, num_tokens: int, now_s: float) -> None:
        """Let a request in; QueueFull names the limit that forbids it."""
        running, requests = limits.running_requests, limits.requests_per_minute
        tokens = limits.tokens_per_minute
        if running is not None and self.running + self.running_elsewhere >= running:
            raise _refusal("running_requests", running, RUNNING_RETRY_S)
        if requests is not None and (wait_s := self.requests.wait_s(1, requests, now_s)) > 0:
            raise _refusal("requests_per_minute", requests, wait_s)
        if tokens is not None and (wait_s := self.tokens.wait_s(num_tokens, tokens, now_s)) > 0:
            raise _refusal("tokens_per_minute", tokens, wait_s)
        self.running += 1
        # What is used without a limit must not count once the file has one.
        self.requests.used = 0.0 if requests is None else self.requests.used + 1
        self.tokens.used = 0.0 if tokens is None else self.tokens.used + num_tokens


def _refusal(word: str, limit: int, wait_s: float) -> QueueFull:
    return QueueFull(
        f"this key's limit {word} = {limit} is reached; try again in {wait_s:.0f} s",
        retry_after_s=wait_s,
    )


class Accounts:
    """Of a server with one API server."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, Account] = {}

    @contextmanager
    def open(self, tenant: str) -> Iterator[Account]:
        """The account of one key, to read and change."""
        yield self._by_tenant.setdefault(tenant, Account.at(time.monotonic()))


class SharedAccounts:
    """The same in a file that several processes map; one of them at a time reads and changes it.

    A row is a key's tenant, its two buckets, and how many requests of it each API server runs. The
    kernel gives the lock back when a process dies, and the process that takes its place forgets
    what it was running. All read the same monotonic clock.
    """

    def __init__(self, path: Path, number: int, count: int) -> None:
        """`number` of `count` API servers."""
        self._number, self._count = number, count
        self._row = struct.Struct(f"<{TENANT_DIGITS}s4d{count}q")
        self._rows: dict[str, int] = {}  # where each key's row is; they stay
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with self._locked():
            os.ftruncate(self._file, MAX_KEYS * self._row.size)
            self._memory = mmap.mmap(self._file, MAX_KEYS * self._row.size)
            for row in range(len(self._tenants())):
                name, *numbers = self._row.unpack_from(self._memory, row * self._row.size)
                numbers[4 + number] = 0
                self._row.pack_into(self._memory, row * self._row.size, name, *numbers)

    @contextmanager
    def open(self, tenant: str) -> Iterator[Account]:
        """The account of one key, to read and change; others wait meanwhile."""
        with self._locked():
            offset = self._find(tenant) * self._row.size
            name, *numbers = self._row.unpack_from(self._memory, offset)
            buckets, running = numbers[:4], numbers[4:]
            account = Account(Bucket(buckets[1], buckets[0]), Bucket(buckets[3], buckets[2]))
            account.running = running[self._number]
            account.running_elsewhere = sum(running) - account.running
            try:
                yield account
            finally:
                running[self._number] = account.running
                requests, tokens = account.requests, account.tokens
                buckets = [requests.used, requests.seen_s, tokens.used, tokens.seen_s]
                self._row.pack_into(self._memory, offset, name, *buckets, *running)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _find(self, tenant: str) -> int:
        if tenant not in self._rows:
            known = self._tenants()
            if tenant not in known:
                if len(known) == MAX_KEYS:
                    raise QueueFull(f"more than {MAX_KEYS} keys have been used; restart the server")
                now_s, name = time.monotonic(), tenant.ljust(TENANT_DIGITS).encode()
                values = (0.0, now_s, 0.0, now_s, *[0] * self._count)
                self._row.pack_into(self._memory, len(known) * self._row.size, name, *values)
                known.append(tenant)
            self._rows = {name: number for number, name in enumerate(known)}
        return self._rows[tenant]

    def _tenants(self) -> list[str]:
        """In the order of their rows."""
        found = []
        for row in range(MAX_KEYS):
            first = row * self._row.size
            name = self._memory[first : first + TENANT_DIGITS]
            if not name[0]:
                break
            found.append(name.decode().strip())
        return found
