"""Starts servers by a command of the cluster's own, such as `srun -N1`; without one, on this host.

What it starts must end when that command gets SIGTERM.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from fastdeploy_core.contracts.small import InstanceSpec
from fastdeploy_core.errors import ConfigError, WorkerError


class MyClusterLauncher:
    """Options: `run`, the command before a server's; `host`, where it then listens."""

    name = "mycluster"
    contract = (1, 2)
    is_head = True

    def __init__(self, options: Mapping[str, str]) -> None:
        unknown = sorted(options.keys() - {"run", "host"})
        if unknown:
            raise ConfigError(f"launcher mycluster has no option {unknown[0]!r}; it has: run, host")
        self._run = shlex.split(options.get("run", ""))
        self._host = options.get("host", "127.0.0.1")
        self._specs: dict[str, InstanceSpec] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, specs: Sequence[InstanceSpec]) -> list[str]:
        """Your cluster: ask for room for all of them first."""
        self._specs = {spec.name: spec for spec in specs}
        return [self.restart(spec.name) for spec in specs]

    def exit_code(self, name: str) -> int | None:
        """Your cluster: what it says of the job. One that is lost has ended."""
        return self._running[name].poll()

    def restart(self, name: str) -> str:
        """Your cluster: start one job, and say where it listens."""
        spec = self._specs[name]
        words = {"{host}": self._host, "{port}": str(spec.port)}
        command = [sys.executable, "-P", *(words.get(word, word) for word in spec.command)]
        try:
            self._running[name] = subprocess.Popen([*self._run, *command])
        except OSError as error:
            self.stop(0)
            raise WorkerError(f"cannot start {name}: {error}") from None
        return f"{self._host}:{spec.port}"

    def stop(self, grace_s: float) -> None:
        """Your cluster: cancel the jobs, gently first."""
        for process in self._running.values():
            process.terminate()
        deadline = time.monotonic() + grace_s
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()
