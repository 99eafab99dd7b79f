"""The driver's options, where its Redis is, and the keys of the internal sockets."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fastdeploy_core.errors import ConfigError

# The hook reads options within a second at start-up, so client libraries are imported when used.
if TYPE_CHECKING:
    import redis

# A call that takes longer has failed: Redis counts as away until one succeeds.
CALL_TIMEOUT_S = 2.0
MIN_KEY_BYTES = 16
_SECTION = "--scheduler-config"
_HOST = re.compile(r"[A-Za-z0-9_.:-]+")


@dataclass(frozen=True, slots=True)
class Server:
    """Where Redis is and how to log in there."""

    host: str = "127.0.0.1"
    port: int = 6379
    db: int = 0
    username: str = ""
    password: str = ""
    password_file: str = ""  # its first line is the password
    tls: bool = False
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""

    def connect(
        self, timeout_s: float = CALL_TIMEOUT_S, on_connect: Callable[[], None] = lambda: None
    ) -> redis.Redis:
        """A client; it connects at its first call. Nothing is repeated behind the caller's back,
        but a closed connection is opened again: on_connect hears of each one."""

        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        def greet(connection: Any) -> None:
            connection.on_connect()
            on_connect()

        tls: dict[str, Any] = {}
        if self.tls:
            tls = {
                "ssl": True,
                "ssl_ca_certs": self.tls_ca_file or None,
                "ssl_certfile": self.tls_cert_file or None,
                "ssl_keyfile": self.tls_key_file or None,
            }
        return redis.Redis(
            host=self.host,
            port=self.port,
            db=self.db,
            username=self.username or None,
            password=self.secret or None,
            protocol=2,  # that of all servers and client libraries
            socket_timeout=timeout_s,
            socket_connect_timeout=CALL_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=cast("Any", greet),  # its stub lacks the argument
            **tls,
        )

    @property
    def secret(self) -> str:
        """The password, wherever it is."""
        if self.password_file:
            return _read(self.password_file, "password_file").decode().partition("\n")[0]
        return self.password

    def __str__(self) -> str:
        return f"Redis at {self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Options:
    """Everything after --scheduler-config, by the original's names where it has one."""

    server: Server
    topic: str = "default"
    load_shards_num: int = 1  # cells: parts of the queue that may live on different servers
    min_load_score: int = 3  # fewer waiting requests are left to the instances of their cell
    max_attempts: int = 3  # so many instances may die of a request
    sync_period: int = 80  # ms between load reports in push mode
    offline: float = 10.0  # s without Redis in which new requests go to instances directly
    listen_host: str = ""  # address on which front ends hear instances of other hosts
    listen_port: int = 0  # 0: any free one
    key_file: str = ""  # secret of the internal sockets, the same for all processes

    @property
    def secret(self) -> bytes:
        """32 bytes that only processes with the key file know; empty without one."""
        if not self.key_file:
            return b""
        return _digest(b"bodies", _read(self.key_file, "key_file"))

    def cell(self, number: int) -> str:
        """What all keys of one cell begin with. Redis Cluster keeps what is in braces together."""
        return f"{{{self.topic}:{number}}}:"


def read_options(given: Mapping[str, Any] | None) -> Options:
    """Check `--scheduler-config`. ConfigError names the option that cannot be."""
    given = {name.replace("-", "_"): value for name, value in (given or {}).items()}
    of_server = {field.name: field for field in fields(Server)}
    of_queue = {field.name: field for field in fields(Options) if field.name != "server"}
    values: dict[str, Any] = {}
    for name, value in given.items():
        field = of_server.get(name) or of_queue.get(name)
        if field is None:
            known = [*of_server, *of_queue]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"possible: {', '.join(known)}"
            raise ConfigError(f"{_SECTION} has no option {name!r}; {hint}")
        values[name] = _typed(name, value, type(field.default))
    server = Server(**{name: values.pop(name) for name in list(values) if name in of_server})
    options = Options(server, **values)
    _check(options)
    return options


def _typed(name: str, value: Any, kind: type) -> Any:
    # What comes from the conformance kit's command line is text.
    if isinstance(value, str) and kind is not str:
        text = value.strip().lower()
        if kind is bool and text in ("true", "false"):
            return text == "true"
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                pass
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # a password of digits
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        shown = "a value of another type" if name == "password" else f"{value!r:.60}"
        raise ConfigError(f"{_SECTION}.{name} must be of type {kind.__name__}, got {shown}")
    return value


def _check(options: Options) -> None:
    limits = (
        ("port", options.server.port, 1, 65535),
        ("db", options.server.db, 0, 10**6),
        ("load_shards_num", options.load_shards_num, 1, 1024),
        ("min_load_score", options.min_load_score, 0, 10**6),
        ("max_attempts", options.max_attempts, 1, 1000),
        ("sync_period", options.sync_period, 5, 60_000),
        ("offline", options.offline, 0, 3600),
        ("listen_port", options.listen_port, 0, 65535),
    )
    for name, value, low, high in limits:
        if not low <= value <= high:
            raise ConfigError(f"{_SECTION}.{name} is {value}; possible: {low} to {high}")
    if not options.topic or set("{} \n") & set(options.topic):
        raise ConfigError(f"{_SECTION}.topic is {options.topic!r}; it may hold no space or brace")
    server = options.server
    if server.password and server.password_file:
        raise ConfigError(f"{_SECTION}: give password or password_file, not both")
    if not server.tls and (server.tls_ca_file or server.tls_cert_file or server.tls_key_file):
        raise ConfigError(f"{_SECTION}: tls_ca_file, tls_cert_file, tls_key_file need tls true")
    if options.listen_host and not _HOST.fullmatch(options.listen_host):
        raise ConfigError(f"{_SECTION}.listen_host is {options.listen_host!r}; give an address")
    if options.listen_host and not options.key_file:
        raise ConfigError(
            f"{_SECTION}.listen_host opens a port, so the sockets need a secret: give "
            f"{_SECTION}.key_file, made by `head -c 32 /dev/urandom > FILE`, to all processes"
        )
    if options.key_file and len(_read(options.key_file, "key_file")) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{_SECTION}.key_file {options.key_file} holds fewer than {MIN_KEY_BYTES} bytes; "
            "make one with `head -c 32 /dev/urandom > FILE`"
        )


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{_SECTION}.{name}: {path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, in ZeroMQ's text form."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class SocketKeys:
    """The two key pairs of a deployment. Each side knows both, since both come from one secret."""

    front: KeyPair
    instance: KeyPair

    @classmethod
    def of(cls, options: Options) -> SocketKeys | None:
        """None without a key file: then sockets are files that only this user can open."""
        if not options.key_file:
            return None
        secret = _read(options.key_file, "key_file")
        return cls(_pair(b"front end", secret), _pair(b"instance", secret))


def _digest(label: bytes, secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=b"fd-sched-redis", salt=label).digest()


def _pair(label: bytes, secret: bytes) -> KeyPair:
    import zmq
    from zmq.utils import z85

    private = z85.encode(_digest(label, secret))
    return KeyPair(zmq.curve_public(private), private)
