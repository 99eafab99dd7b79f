"""A process of engine_child.py: an engine that is started once and measured again and again."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

CHILD: Final = Path(__file__).resolve().parent / "engine_child.py"


class WaitingEngine:
    """An engine that waits in a process of its own for points to measure."""

    def __init__(self, python: str, kind: str, asked: dict[str, Any], limit: float) -> None:
        self._limit = limit
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [python, str(CHILD), kind, json.dumps(asked)],
            env={**os.environ, "OMP_NUM_THREADS": str(asked["threads"])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def answer(self) -> dict[str, float]:
        """The next one; the first says that the engine is ready."""
        assert self._process.stdout is not None
        timer = threading.Timer(self._limit, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        late = not timer.is_alive()
        timer.cancel()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            last = (self._errors.read().strip() or "it ended").splitlines()[-1]
            raise RuntimeError(f"not done within {self._limit:g} s" if late else last)
        found: dict[str, float] = json.loads(line)
        return found

    def ask(self, points: dict[str, tuple[int, int]]) -> dict[str, float]:
        """Tokens per second at every point."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(points) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """End of its input is its end."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
