"""Knobs and counters of one simulated device type, from any process that may read the panel's file.

Knobs: delay_us and random_delay (before every launch), async, late_h2d, strict_copy, fail_alloc_at,
fail_copy_at, fail_launch_at, fail_kernel_at, hang_at (n: the n-th such call from now), lost,
limit_bytes (of memory in use, on all devices of the type), ccl_timeout_ms.
Counters: launches, h2d, d2h, allocs, refused_allocs, used_bytes, stream_syncs, ccl_calls, programs
(operations with shapes not met before in their process: what a compiling device would compile), ...
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_NAME_BYTES = 56
_CELL_BYTES = 64
_VALUE = struct.Struct("<q")


class Panel:
    """The panel in folder/<type>; it exists once a process has loaded the device type."""

    def __init__(self, folder: Path, type_name: str) -> None:
        path = folder / type_name
        try:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
        except (FileNotFoundError, ValueError) as error:
            raise FileNotFoundError(f"no process has loaded device type {type_name!r}") from error
        self._offsets: dict[str, int] = {}
        for start in range(0, len(self._memory), _CELL_BYTES):
            name = self._memory[start : start + _NAME_BYTES].rstrip(b"\0").decode("ascii")
            if name:
                self._offsets[name] = start + _NAME_BYTES

    def __enter__(self) -> Panel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._memory.close()

    @property
    def names(self) -> list[str]:
        """All knobs and counters."""
        return list(self._offsets)

    def get(self, name: str) -> int:
        """One knob's or counter's value now."""
        return int(_VALUE.unpack_from(self._memory, self._offset(name))[0])

    def set(self, **knobs: int) -> None:
        """Turn knobs."""
        for name, value in knobs.items():
            _VALUE.pack_into(self._memory, self._offset(name), value)

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Inside the block things are counted; afterwards the dict holds what changed."""
        before = {name: self.get(name) for name in self._offsets}
        changed: dict[str, int] = {}
        yield changed
        for name, value in before.items():
            if self.get(name) != value:
                changed[name] = self.get(name) - value

    def _offset(self, name: str) -> int:
        try:
            return self._offsets[name]
        except KeyError:
            possible = ", ".join(self._offsets)
            raise KeyError(f"no knob or counter {name!r}; there are: {possible}") from None
