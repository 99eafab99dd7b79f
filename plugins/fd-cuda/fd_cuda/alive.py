"""Notices within a second that another rank of a group is gone.

The ranks form a ring of socket connections. When a process dies, the kernel closes its sockets; a
rank that leaves in good order says goodbye first. A rank that loses a neighbour closes its own
connections, which tells its other neighbour. GPU work that waits for a lost rank would never end by
itself.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fastdeploy_core.errors import WorkerError

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)

_GOODBYE: Final = b"b"
_CONNECT_LIMIT_S: Final = 120.0
_MAX_SOCKET_PATH: Final = 100  # the kernel's limit is 107


class Ring:
    """One rank's place in the ring. Called from a thread, with a text: `on_loss` when a rank died
    (once), `on_leave` when a neighbour said goodbye."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        folder: Path | None,
        host: str,
        on_loss: Callable[[str], None],
        on_leave: Callable[[str], None],
    ) -> None:
        self._rank, self._on_loss, self._on_leave = rank, on_loss, on_leave
        self._lock, self._is_over = threading.Lock(), False
        self._links: list[tuple[int, socket.socket]] = []
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        self._path = ""
        listener = self._listen(folder, host)
        try:
            store.set(f"alive/{rank}", self._path or f"{host}:{listener.getsockname()[1]}")
            listener.settimeout(_CONNECT_LIMIT_S)
            outgoing = _connect(store.get(f"alive/{after}").decode())
            self._links.append((after, outgoing))
            incoming, _ = listener.accept()
            self._links.append((before, incoming))
        except OSError as error:
            self.close()
            raise WorkerError(
                f"rank {rank} could not reach its neighbours of {world_size} ranks within "
                f"{_CONNECT_LIMIT_S:g} s: {error}"
            ) from error
        finally:
            listener.close()
            if self._path:
                with suppress(OSError):
                    Path(self._path).unlink()
        for peer, link in self._links:
            link.settimeout(None)
            threading.Thread(
                target=self._watch, args=(peer, link), name=f"alive-{peer}", daemon=True
            ).start()

    def close(self) -> None:
        """Leave in good order."""
        with self._lock:
            self._is_over = True
        for _, link in self._links:
            with suppress(OSError):
                link.sendall(_GOODBYE)
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _listen(self, folder: Path | None, host: str) -> socket.socket:
        if folder is None:
            return socket.create_server((host, 0))
        path = str(folder / f"alive-{self._rank}")
        if len(path) > _MAX_SOCKET_PATH:
            private = tempfile.mkdtemp(prefix="fastdeploy-alive-")  # mode 0700
            path = str(Path(private) / str(self._rank))
        self._path = path
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(1)
        return listener

    def _watch(self, peer: int, link: socket.socket) -> None:
        try:
            said_goodbye = link.recv(1) == _GOODBYE
        except OSError:
            said_goodbye = False
        with self._lock:
            if self._is_over:
                return
            self._is_over = not said_goodbye
        if said_goodbye:
            self._on_leave(f"rank {peer} has left the group")
            return
        logger.error("rank %d of process %d: rank %d is gone", self._rank, os.getpid(), peer)
        try:
            self._on_loss(
                f"rank {peer} left the group; its process died or was stopped (see its log)"
            )
        finally:
            for _, other in self._links:
                with suppress(OSError):
                    other.shutdown(socket.SHUT_RDWR)


def _connect(address: str) -> socket.socket:
    if "/" in address:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(_CONNECT_LIMIT_S)
        link.connect(address)
        return link
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), _CONNECT_LIMIT_S)
