"""One value for each block, in a Redis or Valkey server that several hosts share.

A value is set at once, so a reader never sees a part. How much is kept, and what goes first, is the
server's business: its maxmemory and maxmemory-policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fastdeploy_core.errors import ConfigError

PREFIX: Final = "fd-kv:"
DEFAULT_URL: Final = "redis://127.0.0.1:6379/0"
CONNECT_S: Final = 1.0
MAX_TTL_S: Final = 10 * 365 * 86400


class RedisStore:
    """Options: `url`, redis:// or rediss:// for TLS, with user and password if need be; `ttl_s`,
    after which a block that nobody has read or written is gone; `timeout_s` of a call."""

    name = "redis"
    contract = (1, 2)

    def __init__(self, options: Mapping[str, Any]) -> None:
        """ConfigError, too, where the server does not answer."""
        url, self._ttl_s, timeout_s = _checked(options)
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=min(CONNECT_S, timeout_s),
            retry=Retry(NoBackoff(), 0),  # a block that does not come is computed
        )
        where = urlsplit(url).netloc.rpartition("@")[2]  # without the password
        try:
            self._client.ping()
        except (redis.RedisError, OSError) as error:
            raise ConfigError(
                f"KV store redis: {where} does not answer: {error}; start it, or name another "
                "server with --kv-store-config.url redis://HOST:PORT"
            ) from error

    def find(self, names: Sequence[str]) -> int:
        """See KVStore."""
        with self._client.pipeline(transaction=False) as calls:
            for name in names:
                calls.exists(PREFIX + name)
            found = calls.execute()
        return next((i for i, one in enumerate(found) if not one), len(found))

    def get(self, name: str, parts: Sequence[memoryview]) -> bool:
        """See KVStore."""
        content = self._client.getex(PREFIX + name, ex=self._ttl_s)
        if not isinstance(content, bytes) or len(content) != sum(part.nbytes for part in parts):
            return False
        at, left = 0, memoryview(content)
        for part in parts:
            part.cast("B")[:] = left[at : at + part.nbytes]
            at += part.nbytes
        return True

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """See KVStore."""
        self._client.set(PREFIX + name, b"".join(parts), ex=self._ttl_s)

    def close(self) -> None:
        """See KVStore."""
        self._client.close()


def _checked(options: Mapping[str, Any]) -> tuple[str, int, float]:
    unknown = sorted(set(options) - {"url", "ttl_s", "timeout_s"})
    if unknown:
        raise ConfigError(
            f"KV store redis has no option {unknown[0]!r}; possible: url, ttl_s, timeout_s, such "
            "as --kv-store-config.url redis://HOST:PORT"
        )
    url = options.get("url", DEFAULT_URL)
    schemes = ("redis://", "rediss://", "unix://")
    if not isinstance(url, str) or not url.startswith(schemes):
        raise ConfigError(
            "KV store redis: url must begin with redis://, rediss:// or unix://; give "
            "--kv-store-config.url redis://HOST:PORT"
        )
    ttl_s, timeout_s = options.get("ttl_s", 86400), options.get("timeout_s", 2.0)
    for name, value, most in (("ttl_s", ttl_s, MAX_TTL_S), ("timeout_s", timeout_s, 60)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise ConfigError(
                f"KV store redis: {name} must be above 0 and at most {most} seconds, got "
                f"{value!r:.40}"
            )
    return url, max(1, int(ttl_s)), float(timeout_s)
