"""A file of named byte arrays with checksums, in which a device's laid-out weights are kept.

Arrays come first, then an index, then a trailer with the position of the index. So the file can be
written while weights arrive, and it is complete only with its last bytes. Everything in it is
checked before it is used.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fastdeploy_core.errors import WeightError

VERSION: Final = 1
_MAGIC: Final = b"FDPACKED"
_TRAILER: Final = struct.Struct("<8sIIQQ")  # magic, version, the index's checksum, start and length
_ALIGNMENT: Final = 64
_NUM_THREADS: Final = 4


class _Array(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    start: int
    length: int
    checksum: int


class _Kept(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    facts: dict[str, Any]
    arrays: list[_Array]


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    layout: str
    weights: dict[str, _Kept]


class PackedFile:
    """A complete and undamaged file of this layout; else WeightError."""

    def __init__(self, path: Path, layout: str) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if size < _TRAILER.size:
                    raise self._damaged(f"it has {size} bytes")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self._refused(f"it cannot be read: {error.strerror or error}") from None
        index = self._read_index(size)
        if index.layout != layout:
            raise self._refused(f"its weights are laid out as {index.layout!r}, this is {layout!r}")
        self._weights = index.weights
        self._check(size)

    def get(self, name: str) -> tuple[dict[str, Any], list[np.ndarray]] | None:
        """The entry of that name, with its arrays over the mapping."""
        kept = self._weights.get(name)
        if kept is None:
            return None
        arrays = [np.frombuffer(self._map, np.uint8, a.length, a.start) for a in kept.arrays]
        return kept.facts, arrays

    def _read_index(self, size: int) -> _Index:
        magic, version, checksum, start, length = _TRAILER.unpack(self._map[-_TRAILER.size :])
        if magic != _MAGIC:
            raise self._damaged("it does not end as such a file does")
        if version != VERSION:
            raise self._refused(f"it is of version {version}, this is version {VERSION}")
        if start + length + _TRAILER.size != size:
            raise self._damaged("its index is not where it should be")
        raw = self._map[start : start + length]
        if zlib.crc32(raw) != checksum:
            raise self._damaged("the checksum of its index is wrong")
        try:
            return msgspec.json.decode(raw, type=_Index)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._damaged(f"its index cannot be read: {error}") from None

    def _check(self, size: int) -> None:
        """Check every array's position and checksum; in parallel, because checksums take time."""
        arrays = [array for kept in self._weights.values() for array in kept.arrays]
        for array in arrays:
            if min(array.start, array.length) < 0 or array.start + array.length > size:
                raise self._damaged("an array lies outside of it")
        with memoryview(self._map) as whole, ThreadPoolExecutor(_NUM_THREADS, "fd-check") as pool:
            sums = pool.map(lambda a: zlib.crc32(whole[a.start : a.start + a.length]), arrays)
            is_whole = all(s == a.checksum for s, a in zip(list(sums), arrays, strict=True))
        if not is_whole:
            raise self._damaged("the checksum of a weight is wrong")

    def _damaged(self, why: str) -> WeightError:
        return self._refused(f"it is damaged or was not written to its end: {why}")

    def _refused(self, why: str) -> WeightError:
        return WeightError(
            f"{self.path} of --weight-cache cannot be used: {why}; delete this file, and the next "
            "start writes it anew, or pass another folder"
        )


class PackedWriter:
    """Writes a file under a temporary name and renames it when it is complete."""

    def __init__(self, path: Path, layout: str) -> None:
        self._path, self._own = path, path.with_name(f".{path.name}.{os.getpid()}")
        self._index = _Index(layout, {})
        self._file = self._own.open("wb")

    def add(self, name: str, facts: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """Add flat uint8 arrays under a name; they are written at once."""
        kept = _Kept(facts, [])
        for array in arrays:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
            kept.arrays.append(_Array(self._file.tell(), array.nbytes, zlib.crc32(array.data)))
            self._file.write(array.data)
        self._index.weights[name] = kept

    def finish(self) -> int:
        """Complete and rename the file; returns its size in bytes."""
        raw, start = msgspec.json.encode(self._index), self._file.tell()
        self._file.write(raw)
        self._file.write(_TRAILER.pack(_MAGIC, VERSION, zlib.crc32(raw), start, len(raw)))
        size = self._file.tell()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._own.replace(self._path)
        return size

    def drop(self) -> None:
        """Remove the unfinished file."""
        self._file.close()
        self._own.unlink(missing_ok=True)
