"""A few numbers in shared memory that show from outside whether an engine moves.

The engine writes, its parent reads; nobody waits. A process that is stopped, stuck in a device call
or holding the interpreter lock cannot pretend to be well here.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_LAYOUT = struct.Struct("<QQ")  # how often it moved; when it last did, monotonic nanoseconds
_SIZE = 4096


class Progress:
    """The numbers, in a file of the engine's private folder; the monotonic clock is the host's."""

    def __init__(self, folder: Path | str, *, create: bool = False) -> None:
        path = Path(folder) / "progress"
        if create:
            path.write_bytes(bytes(_SIZE))
            path.chmod(0o600)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._count = 0

    def mark(self) -> None:
        """A step was completed, or there was nothing to do."""
        self._count += 1
        _LAYOUT.pack_into(self._memory, 0, self._count, time.monotonic_ns())

    @property
    def count(self) -> int:
        """How often it moved; 0 until it is ready."""
        return int(_LAYOUT.unpack_from(self._memory)[0])

    @property
    def age_s(self) -> float:
        """Seconds since it last moved; 0 until it is ready."""
        count, moved_ns = _LAYOUT.unpack_from(self._memory)
        return max(0.0, (time.monotonic_ns() - moved_ns) / 1e9) if count else 0.0

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
