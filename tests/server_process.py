"""Commands of `fastdeploy` in processes of their own, as an operator runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
START_S = 180.0
_URL = re.compile(r"(?:serving .*|routing) at (http://\S+)")


def environment() -> dict[str, str]:
    """For child processes: this checkout, few threads, no settings of the caller's."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("FD_")}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def command(*arguments: str) -> list[str]:
    """The command line of this checkout."""
    return [sys.executable, "-P", "-m", "fastdeploy_core.cli.main", *arguments]


def run(*arguments: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    """One command from start to end."""
    return subprocess.run(
        command(*arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class CommandProcess:
    """A command of `fastdeploy` that listens; its log is kept."""

    def __init__(
        self, *arguments: str, extra: Mapping[str, str] | None = None, within: Sequence[str] = ()
    ) -> None:
        """extra: of its environment. within: a command that runs it in its own place, by exec."""
        self.process = subprocess.Popen(
            [*within, *command(*arguments)],
            env=environment() | dict(extra or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        """Where it listens; waits until it does."""
        deadline = time.monotonic() + START_S
        while not (match := _URL.search(self.log)):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, f"waited {START_S} s for it to listen: {self.log}"
            time.sleep(0.005)
        return match[1]

    @property
    def name(self) -> str:
        """HOST:PORT, as routers name it."""
        return self.url.removeprefix("http://")

    def children(self) -> list[int]:
        """Processes it started that still live."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for listed in threads for pid in listed.read_text().split()]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 120) -> int:
        """Its exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join()
        return code

    def stop(self) -> int:
        """End it, if it lives; its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                return self.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.wait()


class ServerProcess(CommandProcess):
    """A running `fastdeploy serve`."""

    def __init__(
        self, model: Path, *arguments: str, extra: Mapping[str, str] | None = None
    ) -> None:
        where = ("--host", "127.0.0.1", "--port", "0")
        super().__init__("serve", str(model), *where, *arguments, extra=extra)


@contextmanager
def serving(
    model: Path, *arguments: str, extra: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server that is gone afterwards, whatever the test did; `extra` goes into its
    environment."""
    server = ServerProcess(model, *arguments, extra=extra)
    try:
        yield server
    finally:
        server.stop()
