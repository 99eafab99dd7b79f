"""Collectives between processes of one machine: data in shared memory, turns over unix sockets.

Each rank owns one piece of memory that the others map; it holds two slots, used in turn. A
collective is: write my slot, send every peer a header, await theirs, read their slots. A peer's
header for the next collective says that it has finished reading this one, so two slots are enough.
Every rank adds the slots in rank order, so all get the same bits. A peer that dies closes its
sockets, which the others notice at once; one that hangs is given up after a time limit.
"""

from __future__ import annotations

import mmap
import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor, TensorLibrary

_HELLO: Final = struct.Struct("<8sII")  # magic, rank, world size
_MAGIC: Final = b"fdcomm01"
_HEADER: Final = struct.Struct("<QIIQ")  # turn, operation, source rank, bytes
_SUM, _GATHER, _BROADCAST, _BARRIER = range(4)
_NAMES: Final = ("all_reduce", "all_gather", "broadcast", "barrier")
SLOT_BYTES: Final = 4 * 1024 * 1024
_MAX_SOCKET_PATH: Final = 100  # the kernel's limit is 107
_RETRY_S: Final = 0.01


class SharedMemoryCommunicator:
    """One rank's end. Not thread safe: ranks issue the same collectives in the same order."""

    def __init__(
        self,
        xp: TensorLibrary,
        rank: int,
        world_size: int,
        folder: Path,
        *,
        connect_timeout_s: float = 120.0,
        timeout_s: float = 60.0,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._xp = xp
        self._timeout_s = timeout_s
        self._turn = 0
        self._failure = ""
        self._peers: dict[int, socket.socket] = {}
        self._memories: list[mmap.mmap] = []
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is outside a group of {world_size}")
        if world_size == 1:
            return
        check_private(folder, "join a group")
        try:
            self._connect(folder, time.monotonic() + connect_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def sockets(self) -> list[socket.socket]:
        """To each other rank: readable when it has begun the next collective, or has left."""
        return list(self._peers.values())

    # -- collectives ------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, added in rank order; narrow floats are added in float32."""
        if self.world_size == 1:
            return x
        xp = self._xp
        narrow = xp.dtype_name(x) in ("bfloat16", "float16")
        mine = xp.to_numpy(x.float() if narrow else x).reshape(-1)
        total = np.empty_like(mine)

        def read(part: slice, slots: list[memoryview]) -> None:
            """Add everybody's numbers."""
            pieces = [np.frombuffer(slot, dtype=mine.dtype) for slot in slots]
            target = total[part.start // mine.itemsize : part.stop // mine.itemsize]
            np.add(pieces[0], pieces[1], out=target)
            for piece in pieces[2:]:
                np.add(target, piece, out=target)

        self._exchange(_SUM, 0, _bytes(mine), read)
        result = xp.from_numpy(total).reshape(list(x.shape))
        return result.to(x.dtype) if narrow else result

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's x along dim, in rank order."""
        if self.world_size == 1:
            return x
        mine = self._xp.to_numpy(x)
        everything = np.empty((self.world_size, *mine.shape), dtype=mine.dtype)
        target = everything.reshape(self.world_size, -1).view(np.uint8)

        def read(part: slice, slots: list[memoryview]) -> None:
            """Take everybody's bytes."""
            for rank, slot in enumerate(slots):
                target[rank, part] = np.frombuffer(slot, dtype=np.uint8)

        self._exchange(_GATHER, 0, _bytes(mine), read)
        pieces = [self._xp.from_numpy(piece, x.dtype) for piece in everything]
        return self._xp.cat(pieces, dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """The source's x; every rank passes a tensor of that shape and dtype."""
        if self.world_size == 1:
            return x
        mine = self._xp.to_numpy(x)
        result = np.empty(mine.nbytes, dtype=np.uint8)

        def read(part: slice, slots: list[memoryview]) -> None:
            """Take the source's bytes."""
            result[part] = np.frombuffer(slots[source], dtype=np.uint8)

        self._exchange(_BROADCAST, source, _bytes(mine), read)
        if self.rank == source:
            return x
        return self._xp.from_numpy(result.view(mine.dtype).reshape(mine.shape), x.dtype)

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        if self.world_size > 1:
            self._exchange(_BARRIER, 0, memoryview(b""), lambda part, slots: None)

    def close(self) -> None:
        """Leave the group; the others' next collective fails."""
        self._failure = self._failure or "the communicator is closed"
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        for memory in self._memories:
            # A view that a caller's traceback still holds keeps the mapping until it goes.
            with suppress(BufferError):
                memory.close()
        self._memories.clear()

    # -- turns ------------------------------------------------------------------------------------

    def _exchange(
        self,
        operation: int,
        source: int,
        data: memoryview,
        read: Callable[[slice, list[memoryview]], None],
    ) -> None:
        """One or more turns: `read` gets each part of the data as it lies in every rank's slot."""
        if self._failure:
            raise WorkerError(f"{_NAMES[operation]} on rank {self.rank} failed: {self._failure}")
        for start in range(0, max(1, len(data)), SLOT_BYTES):
            part = slice(start, min(start + SLOT_BYTES, len(data)))
            offset = (self._turn % 2) * SLOT_BYTES
            place = slice(offset, offset + part.stop - part.start)
            if part.stop > part.start:
                self._memories[self.rank][place] = data[part]
            try:
                self._await_peers(_HEADER.pack(self._turn, operation, source, len(data)))
            except WorkerError as error:
                self._failure = str(error)
                raise
            self._turn += 1
            read(part, [memoryview(memory)[place] for memory in self._memories])

    def _await_peers(self, header: bytes) -> None:
        deadline = time.monotonic() + self._timeout_s
        for rank, peer in self._peers.items():
            try:
                peer.sendall(header)
            except OSError as error:
                raise self._lost(rank, error) from error
        for rank, peer in self._peers.items():
            theirs = self._receive(rank, peer, deadline)
            if theirs != header:
                mine, other = _HEADER.unpack(header), _HEADER.unpack(theirs)
                raise WorkerError(
                    f"ranks disagree on collective {mine[0]}: rank {self.rank} called "
                    f"{_describe(mine)}, rank {rank} called {_describe(other)}"
                )

    def _receive(self, rank: int, peer: socket.socket, deadline: float) -> bytes:
        received = b""
        while len(received) < _HEADER.size:
            try:
                peer.settimeout(max(0.001, deadline - time.monotonic()))
                more = peer.recv(_HEADER.size - len(received))
            except TimeoutError as error:
                raise WorkerError(
                    f"rank {rank} did not reach collective {self._turn} within "
                    f"{self._timeout_s:g} s of rank {self.rank}; it hangs or is overloaded"
                ) from error
            except OSError as error:
                raise self._lost(rank, error) from error
            if not more:
                raise self._lost(rank, None)
            received += more
        return received

    def _lost(self, rank: int, error: OSError | None) -> WorkerError:
        reason = f" ({error.strerror})" if error is not None and error.strerror else ""
        return WorkerError(
            f"rank {rank} left the group before collective {self._turn} of rank "
            f"{self.rank}{reason}; its process died or was stopped"
        )

    # -- joining ----------------------------------------------------------------------------------

    def _connect(self, folder: Path, deadline: float) -> None:
        """Listen for higher ranks, call lower ones, and exchange memory with each."""
        own_file = _shared_file(folder)
        try:
            with _listen(folder / f"rank{self.rank}.sock") as listener:
                files = {self.rank: own_file}
                for rank in range(self.rank):
                    self._peers[rank] = _call(folder / f"rank{rank}.sock", rank, deadline)
                    self._peers[rank].sendall(_HELLO.pack(_MAGIC, self.rank, self.world_size))
                for _ in range(self.rank + 1, self.world_size):
                    rank, peer = self._accept(listener, deadline)
                    self._peers[rank] = peer
                for peer in self._peers.values():
                    socket.send_fds(peer, [b"m"], [own_file])
                for rank, peer in self._peers.items():
                    files[rank] = self._receive_file(rank, peer, deadline)
                self._peers = dict(sorted(self._peers.items()))
                self._memories = [mmap.mmap(files[rank], 2 * SLOT_BYTES) for rank in sorted(files)]
                for rank in self._peers:
                    os.close(files[rank])
        finally:
            os.close(own_file)

    def _accept(self, listener: socket.socket, deadline: float) -> tuple[int, socket.socket]:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            peer, _ = listener.accept()
            peer.settimeout(max(0.001, deadline - time.monotonic()))
            magic, rank, world_size = _HELLO.unpack(peer.recv(_HELLO.size, socket.MSG_WAITALL))
        except (TimeoutError, struct.error) as error:
            missing = sorted(set(range(self.rank + 1, self.world_size)) - set(self._peers))
            raise WorkerError(
                f"rank {self.rank} of {self.world_size}: ranks {missing} did not join in time; "
                "their processes failed or are still starting"
            ) from error
        if (magic, world_size) != (_MAGIC, self.world_size) or not (
            self.rank < rank < self.world_size and rank not in self._peers
        ):
            peer.close()
            raise WorkerError(
                f"rank {self.rank} of {self.world_size} was called by rank {rank} of {world_size}; "
                "the group's folder must be fresh and shared by its ranks only"
            )
        return rank, peer

    def _receive_file(self, rank: int, peer: socket.socket, deadline: float) -> int:
        peer.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            message, files, _, _ = socket.recv_fds(peer, 1, 1)
        except OSError as error:
            raise self._lost(rank, error) from error
        if message != b"m" or len(files) != 1:
            raise self._lost(rank, None)
        return files[0]


def check_private(folder: Path, purpose: str) -> None:
    """ConfigError unless only this user can enter the folder: sockets in it are not
    authenticated."""
    try:
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"cannot {purpose} in {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"cannot {purpose} in {folder}: it must be a folder of this user with mode 0700, and "
            f"has {stat.S_IMODE(status.st_mode):04o}; run chmod 700"
        )


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"cannot create the socket {path}: its path exceeds {_MAX_SOCKET_PATH} bytes; "
            "set TMPDIR to a shorter folder"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        listener.listen()
    except OSError as error:
        listener.close()
        raise WorkerError(f"cannot listen on {path}: {error.strerror}") from error
    return listener


def _call(path: Path, rank: int, deadline: float) -> socket.socket:
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.connect(os.fspath(path))
            return peer
        except (FileNotFoundError, ConnectionRefusedError) as error:
            peer.close()
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"rank {rank} did not open {path} in time; its process failed or still starts"
                ) from error
            time.sleep(_RETRY_S)


def _shared_file(folder: Path) -> int:
    """A file that lives as long as somebody maps it, large enough for both slots."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("fastdeploy-collectives")
    else:
        descriptor, name = tempfile.mkstemp(dir=folder)
        Path(name).unlink()
    os.ftruncate(descriptor, 2 * SLOT_BYTES)
    return descriptor


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _describe(header: tuple[Any, ...]) -> str:
    turn, operation, source, size = header
    name = _NAMES[operation] if operation < len(_NAMES) else str(operation)
    origin = f" from rank {source}" if operation == _BROADCAST else ""
    return f"{name} of {size} bytes{origin} as its number {turn}"
