"""How busy each API server of one port is, and whether all of them drain or are paused: a few
numbers in memory that they share with the front door.

Each API server writes its own row and reads all rows, without locks. Sums may lag by a moment, so a
limit may be exceeded by the requests that arrive in that moment.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_ROW = struct.Struct("<QQ")  # requests in flight; connections that have ended


class Occupancy:
    """The table. `path`: a file that several processes map; without it, memory of this process."""

    def __init__(self, count: int = 1, path: Path | None = None, *, create: bool = False) -> None:
        self.count, self.path = count, path
        size = count * _ROW.size + 2
        self._memory: mmap.mmap | bytearray = bytearray(size)
        if path is None:
            return
        if create:
            path.write_bytes(bytes(size))
            path.chmod(0o600)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)

    def write(self, number: int, in_flight: int, num_closed: int) -> None:
        """Write one API server's row."""
        _ROW.pack_into(self._memory, number * _ROW.size, in_flight, num_closed)

    def num_closed(self, number: int) -> int:
        """Connections of one API server that have ended."""
        return int(_ROW.unpack_from(self._memory, number * _ROW.size)[1])

    def in_flight(self) -> int:
        """Requests in flight in all API servers."""
        rows = memoryview(self._memory)[:-2]
        return sum(in_flight for in_flight, _ in _ROW.iter_unpack(rows))

    def drain(self) -> None:
        """Take no new requests, for good: the port belongs to servers that will end."""
        self._memory[-1] = 1

    def pause(self, epoch: int) -> None:
        """The engine that was started again so often is paused or asleep; -1: it is not."""
        self._memory[-2] = (epoch + 1) % 256

    def is_paused(self, epoch: int) -> bool:
        """Whether that engine is; one that was started again since is not."""
        return 0 != self._memory[-2] == (epoch + 1) % 256

    @property
    def is_draining(self) -> bool:
        """Whether that was asked for, here or in another process."""
        return bool(self._memory[-1])


class OwnOccupancy:
    """One API server's row."""

    def __init__(self, table: Occupancy | None = None, number: int = 0) -> None:
        self.table = table or Occupancy()
        self.number = number
        self.in_flight = 0  # requests in this API server
        self._num_closed = 0
        self._write()

    def change(self, count: int) -> None:
        """Add to the number of requests in flight here."""
        self.in_flight += count
        self._write()

    def closed(self) -> None:
        """A connection has ended."""
        self._num_closed += 1
        self._write()

    def _write(self) -> None:
        self.table.write(self.number, self.in_flight, self._num_closed)
