"""One file for each block, in a folder that several engines may share.

A file is written under another name and renamed when it is whole, so a reader never sees a part. A
crash or a power failure may leave a file without its content; the core's checksum finds that.
The files' times say which were used least recently: these go when the folder is full.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdeploy_core.errors import ConfigError

GIB = 2**30
DEFAULT_GIB = 16.0
# After so much of max_gib has been written, the folder's size is looked at again: others write too.
SHARE_BETWEEN_LOOKS = 1 / 16
SHARE_KEPT = 7 / 8  # of max_gib, when files have to go
POLL_S = 0.002
UNFINISHED_S = 3600.0  # an unfinished file that is older belongs to a process that has died
UNFINISHED = ".part"


class DiskStore:
    """Options: `path`, a folder that is made if need be, and `max_gib`, its size. With `wait_s` a
    block that is not there is waited for so long, since another engine may just be writing it."""

    name = "disk"
    contract = (1, 2)

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._folder, self._max_bytes = _checked(options)
        self._wait_s = float(options.get("wait_s", 0.0))
        self._lock = threading.Lock()  # one thread at a time makes room
        self._until_look = 0.0  # bytes

    def find(self, names: Sequence[str]) -> int:
        """See KVStore."""
        found, moved_s = 0, time.monotonic()
        while found < len(names):
            if self._path(names[found]).exists():
                found, moved_s = found + 1, time.monotonic()
            elif time.monotonic() - moved_s >= self._wait_s:
                break
            else:
                time.sleep(POLL_S)
        return found

    def get(self, name: str, parts: Sequence[memoryview]) -> bool:
        """See KVStore."""
        wanted = sum(part.nbytes for part in parts)
        try:
            file = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if os.fstat(file).st_size != wanted:
                return False
            with contextlib.suppress(OSError):  # the folder may be read-only
                os.utime(file)
            return _transfer(os.readv, file, parts) == wanted
        finally:
            os.close(file)

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """See KVStore."""
        size = sum(part.nbytes for part in parts)
        self._make_room(size)
        path = self._path(name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_name(f"{name}.{secrets.token_hex(8)}{UNFINISHED}")
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                _transfer(os.writev, file, parts)
            finally:
                os.close(file)
            unfinished.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def close(self) -> None:
        """Nothing is open between calls."""

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _make_room(self, size: int) -> None:
        """Keep the folder within its size. What other engines write is seen at the next look."""
        with self._lock:
            self._until_look -= size
            if self._until_look > 0:
                return
            files, now = [], time.time()
            for path, status in _files(self._folder):
                if path.endswith(UNFINISHED):
                    if now - status.st_mtime > UNFINISHED_S:
                        _remove(path)
                    continue
                files.append((status.st_mtime_ns, status.st_size, path))
            used = size + sum(file[1] for file in files)
            if used > self._max_bytes:
                files.sort()
                for _, file_size, path in files:
                    if used <= self._max_bytes * SHARE_KEPT:
                        break
                    _remove(path)
                    used -= file_size
            step = self._max_bytes * SHARE_BETWEEN_LOOKS
            self._until_look = max(0.0, min(step, self._max_bytes - used))


def _checked(options: Mapping[str, Any]) -> tuple[Path, int]:
    unknown = sorted(set(options) - {"path", "max_gib", "wait_s"})
    if unknown:
        raise ConfigError(
            f"KV store disk has no option {unknown[0]!r}; possible: path, max_gib, wait_s, such "
            "as --kv-store-config.path DIR"
        )
    wait_s = options.get("wait_s", 0.0)
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= 60:
        raise ConfigError(f"KV store disk: wait_s must be 0 to 60 seconds, got {wait_s!r:.40}")
    path, max_gib = options.get("path"), options.get("max_gib", DEFAULT_GIB)
    if not isinstance(path, str) or not path:
        raise ConfigError("KV store disk needs a folder; give --kv-store-config.path DIR")
    if isinstance(max_gib, bool) or not isinstance(max_gib, int | float) or not max_gib > 0:
        raise ConfigError(
            f"KV store disk: max_gib must be a number above 0, got {max_gib!r:.40}; give "
            "--kv-store-config.max_gib NUMBER"
        )
    folder = Path(path).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"KV store disk cannot use the folder {folder}: {error.strerror}; name another one "
            "with --kv-store-config.path"
        ) from error
    if mode & 0o002:
        raise ConfigError(
            f"KV store disk: everybody may write to {folder}, so anybody could decide what the "
            f"model reads; run: chmod o-w {folder}"
        )
    return folder, int(max_gib * GIB)


def _transfer(call: Any, file: int, parts: Sequence[memoryview]) -> int:
    """readv or writev until all parts are done or nothing comes; returns the bytes moved."""
    left, moved = [part.cast("B") for part in parts if part.nbytes], 0
    while left:
        count = call(file, left)
        if not count:
            break
        moved += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if left:
            left[0] = left[0][count:]
    return moved


def _files(folder: Path) -> list[tuple[str, os.stat_result]]:
    """The files of the store; other files in the folder are left alone."""
    found = []
    for prefix in os.scandir(folder):
        if len(prefix.name) != 2 or not prefix.is_dir(follow_symlinks=False):
            continue
        for file in os.scandir(prefix.path):
            if file.name.startswith(prefix.name):
                with contextlib.suppress(FileNotFoundError):  # another engine's doing
                    found.append((file.path, file.stat(follow_symlinks=False)))
    return found


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
