"""Servers as processes: all on this host, or on a list of hosts those of this one."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from fastdeploy_core.contracts.small import InstanceSpec
from fastdeploy_core.errors import ConfigError, WorkerError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class LocalLauncher:
    """All servers on this host."""

    name = "local"
    contract = (1, 2)
    is_head = True

    def __init__(self, options: Mapping[str, str]) -> None:
        check_options(self.name, options, ())
        self._hosts = ["127.0.0.1"]
        self._node = 0
        self._specs: dict[str, tuple[InstanceSpec, str]] = {}  # with their hosts
        self._running: dict[str, subprocess.Popen[bytes]] = {}  # the servers of this host

    def start(self, specs: Sequence[InstanceSpec]) -> list[str]:
        """Server i runs on host i, and on from the first one."""
        places = [number % len(self._hosts) for number in range(len(specs))]
        own = [spec for spec, place in zip(specs, places, strict=True) if place == self._node]
        if len(own) > 1 and any(spec.num_devices for spec in own):
            raise ConfigError(
                f"{len(own)} servers of one host would use the same devices; start one with "
                "--data-parallel-size, which gives each engine its own"
            )
        for spec, place in zip(specs, places, strict=True):
            self._specs[spec.name] = spec, self._hosts[place]
        try:
            for spec in own:
                self.restart(spec.name)
        except WorkerError:
            self.stop(0)
            raise
        return [_address(*self._specs[spec.name]) for spec in specs]

    def exit_code(self, name: str) -> int | None:
        """None for a server of another host."""
        process = self._running.get(name)
        return None if process is None else process.poll()

    def restart(self, name: str) -> str:
        """Starts it here."""
        spec, host = self._specs[name]
        try:
            self._running[name] = start(command_of(spec, host))
        except OSError as error:
            raise WorkerError(f"cannot start {name}: {error}") from None
        return _address(spec, host)

    def stop(self, grace_s: float) -> None:
        """Ends the servers of this host."""
        end_all(list(self._running.values()), grace_s)
        self._running.clear()


class StaticLauncher(LocalLauncher):
    """A list of hosts. The same command runs on each, with its own node rank; rank 0 has the
    router."""

    name = "static"

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__({})
        check_options(self.name, options, ("ips", "node_rank"))
        self._hosts = [word.strip() for word in options.get("ips", "").split(",") if word.strip()]
        rank = options.get("node_rank", "")
        if not self._hosts or not rank.isdecimal() or int(rank) >= len(self._hosts):
            raise ConfigError(
                "launcher static needs --ips with the addresses of all hosts, --node-rank below "
                f"their number; given: {', '.join(self._hosts) or 'none'}, {rank or 'none'}"
            )
        self._node = int(rank)
        self.is_head = self._node == 0


def check_options(name: str, options: Mapping[str, str], known: Sequence[str]) -> None:
    """ConfigError for an option that the launcher does not have."""
    for key in options:
        if key not in known:
            raise ConfigError(
                f"launcher {name} has no option {key!r}; it has: {', '.join(known) or 'none'}"
            )


def command_of(spec: InstanceSpec, host: str) -> list[str]:
    """The command that starts a server at that address."""
    words = {"{host}": host, "{port}": str(spec.port)}
    return [sys.executable, "-P", *(words.get(word, word) for word in spec.command)]


def start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process. Linux sends it SIGTERM when this one is killed, so that its port and its devices
    are free for the next launch."""
    asked = None if _LIBC is None else _end_with_parent
    return subprocess.Popen(words, preexec_fn=asked)  # noqa: S603 - there are no threads


def _end_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def end_all(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """SIGTERM, and SIGKILL to what still runs after grace_s."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(spec: InstanceSpec, host: str) -> str:
    return f"[{host}]:{spec.port}" if ":" in host else f"{host}:{spec.port}"
