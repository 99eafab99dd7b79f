"""A redis-server (or valkey-server) of one's own, for tests and benchmarks: in its own folder, on a
free port, without anything to survive its folder."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

SERVERS = ("redis-server", "valkey-server")


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisProcess:
    """A server in a folder of its own, which can be killed and started again."""

    def __init__(self, folder: Path, *settings: str, program: str = "") -> None:
        self.program = program or next(filter(shutil.which, SERVERS))
        self.folder, self.settings = folder, settings
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers; a wrong password is an answer, too."""
        command = [
            self.program, "--port", str(self.port), "--bind", "127.0.0.1",
            "--dir", str(self.folder), "--save", "", "--logfile", "log", *self.settings,
        ]  # fmt: skip
        self.process = subprocess.Popen(command)  # noqa: S603
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.settimeout(1.0)
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    probe.sendall(b"PING\r\n")
                    if probe.recv(64)[:8] in (b"+PONG\r\n", b"-NOAUTH "):
                        return
            time.sleep(0.02)
        raise RuntimeError(f"{self.program} did not start: see {self.folder}/log")

    def kill(self) -> None:
        """End it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def client(self, **options: Any) -> redis.Redis:
        """A plain client; a call that fails is not repeated."""
        return redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0), **options)

    def options(self, **more: Any) -> dict[str, Any]:
        """What --scheduler-config would hold."""
        return {"port": self.port, **more}
