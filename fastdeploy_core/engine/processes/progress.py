"""Two numbers in shared memory that show to other processes whether an engine makes progress.

The engine writes and its parent reads; neither waits. A process that is stopped, stuck in a device
call or stuck while it holds the interpreter lock cannot write here, so it cannot seem well.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

_SIZE = 4096
_COUNT, _MOVED_NS = 0, 1  # how often it moved; when it last moved, in monotonic nanoseconds


class Progress:
    """The numbers, in a file of the engine's private folder. The monotonic clock is the same for
    all processes of a host."""

    def __init__(self, folder: Path | str, *, create: bool = False) -> None:
        path = Path(folder) / "progress"
        if create:
            path.write_bytes(bytes(_SIZE))
            path.chmod(0o600)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        # Each number is written and read whole. struct would clear the bytes first, and a reader at
        # that moment would see an engine that has not moved since the host was started.
        self._numbers = memoryview(self._memory).cast("Q")
        self._count = 0

    def mark(self) -> None:
        """Record progress: a step was completed, or there was nothing to do."""
        self._count += 1
        self._numbers[_MOVED_NS] = time.monotonic_ns()
        self._numbers[_COUNT] = self._count

    @property
    def count(self) -> int:
        """How often it moved; 0 until it is ready."""
        return self._numbers[_COUNT]

    @property
    def age_s(self) -> float:
        """Seconds since it last moved; 0 until it is ready."""
        moved_ns = self._numbers[_MOVED_NS]
        return max(0.0, (time.monotonic_ns() - moved_ns) / 1e9) if moved_ns else 0.0

    def close(self) -> None:
        """Release the memory; later calls raise ValueError."""
        self._numbers.release()
        self._memory.close()
