"""The side that reads: connections to one peer, and the transfers from it.

One connection carries notes and the question whether the peer is still there; several others carry
blocks.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from multiprocessing import connection
from typing import TYPE_CHECKING, Final, Protocol

from fd_scale_out.receiver_driven import MAX_NOTES, Descriptor, Transfer, WireError, cut

from fastdeploy_core.contracts.base import CONTRACT

from . import wire
from .wire import Channel, Progress

if TYPE_CHECKING:
    from .transport import TcpTransport

NUM_STREAMS: Final = 2  # more of them wait for the interpreter: 4 are 0.8 times as fast
BATCH_BYTES: Final = 1 << 20  # asked for at once; a larger block travels alone
MAX_BATCH_BLOCKS: Final = 16384
PINGS_PER_TIMEOUT: Final = 4


class Fetcher(Protocol):
    """Brings blocks of one peer here, for one thread."""

    def ask(self, transfer: Transfer, first: int, count: int) -> None:
        """So many blocks of a transfer, from index `first` on, will be fetched, after those that
        were asked for before. WireError or OSError: the peer is lost."""
        ...

    def fetch(self, transfer: Transfer, first: int, count: int) -> None:
        """Put them in their places, as far as they are still wanted. Errors as of `ask`."""
        ...

    def close(self) -> None:
        """Nothing more is fetched."""
        ...


class _Frames:
    """Fetches by asking for frames."""

    def __init__(self, transport: TcpTransport, channel: Channel) -> None:
        self._transport, self._channel = transport, channel
        self._buffer = memoryview(b"")

    def ask(self, transfer: Transfer, first: int, count: int) -> None:
        blocks = [int(b) for b in transfer.plan.source_blocks[first : first + count]]
        self._channel.send(wire.Read(list(transfer.plan.region_ids), blocks))

    def fetch(self, transfer: Transfer, first: int, count: int) -> None:
        size = count * transfer.block_bytes
        if size > len(self._buffer):  # new memory each time would cost as much as the copy
            self._buffer = memoryview(bytearray(size))
        content = self._buffer[:size]
        self._channel.receive_data(content)
        self._transport.land_all(transfer, first, cut(content, transfer.block_bytes))

    def close(self) -> None:
        """The peer closes its sockets."""


class Peer:
    """Whom this transport has connected to. Methods without `_` are called with its lock held."""

    num_streams = NUM_STREAMS
    batch_bytes = BATCH_BYTES
    # Batches of a stream at once, if there is enough for all streams: the peer always has work.
    max_asked = 2

    def __init__(self, transport: TcpTransport, descriptor: Descriptor) -> None:
        self.name = descriptor.peer
        self.regions = {r.region_id: r for r in descriptor.regions}
        self.is_down = False
        self.transfers: list[Transfer] = []
        self._transport, self._descriptor = transport, descriptor
        self._has_job = threading.Condition(transport.lock)
        self._notes: deque[tuple[frozenset[Transfer], bytes]] = deque()
        self._sockets: list[socket.socket] = []
        self._progress = Progress()
        self._wakes, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        transport.start(self._control)
        for _ in range(self.num_streams):
            transport.start(self._stream)

    def begin(self, transfer: Transfer) -> None:
        """Fetch a checked transfer's blocks."""
        self.transfers.append(transfer)
        self._has_job.notify_all()

    def end(self, transfer: Transfer) -> None:
        """Nothing of it is copied from now on."""
        with contextlib.suppress(ValueError):
            self.transfers.remove(transfer)
        self.wake()

    def note(self, data: bytes) -> bool:
        """Queue a note after the transfers that there are; False: too many wait."""
        if len(self._notes) >= MAX_NOTES:
            return False
        self._notes.append((frozenset(self.transfers), data))
        self.wake()
        return True

    def wake(self) -> None:
        """Make the control thread look at its work."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def leave(self) -> None:
        """End all connections and threads of it."""
        self.is_down = True
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._has_job.notify_all()
        self.wake()

    def fetcher(self) -> Fetcher:
        """What brings blocks, for one thread."""
        return _Frames(self._transport, self.connect())

    def connect(self) -> Channel:
        """An authenticated connection to exactly this peer."""
        own, there = self._transport, self._descriptor
        timeout_s = own.options.progress_timeout_s
        host, _, port = there.address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout_s)
        secured = None if own.tls is None else own.tls.under(sock, is_client=True)
        sock = secured or sock
        with own.lock:
            self._sockets.append(sock)
            if self.is_down:
                raise WireError("no longer wanted")
        if secured is not None:
            secured.do_handshake()
        channel = Channel(sock, own.options.secret, is_client=True, progress=self._progress)
        channel.ask(
            wire.Hello(
                protocol=wire.PROTOCOL,
                major=CONTRACT[0],
                epoch=own.epoch,
                expected_epoch=there.epoch,
                model_revision=own.options.model_revision,
                layouts=own.layouts(),
            )
        )
        return channel

    def _control(self) -> None:
        lock, pause_s = self._transport.lock, self._transport.options.progress_timeout_s
        try:
            channel, next_ping_s = self.connect(), 0.0
            while not self.is_down:
                with lock:
                    data = self._due_note()
                if data is not None:
                    channel.ask(wire.Note(data))
                elif time.monotonic() >= next_ping_s:
                    channel.ask(wire.Ping())
                    next_ping_s = time.monotonic() + pause_s / PINGS_PER_TIMEOUT
                left_s = max(0.0, next_ping_s - time.monotonic())
                readable = connection.wait([channel.fileno(), self._wakes.fileno()], left_s)
                if self._wakes.fileno() in readable:
                    self._wakes.recv(4096)
                if channel.fileno() in readable:
                    channel.receive()
                    raise WireError("the peer spoke without being asked")
        except (WireError, OSError, ValueError) as error:
            self._transport.lose(self, _words(error, pause_s))
        finally:
            self._wakes.close()
            self._wake.close()
            with lock:
                for sock in self._sockets:
                    sock.close()

    def _due_note(self) -> bytes | None:
        if self._notes and all(transfer.is_over for transfer in self._notes[0][0]):
            data = self._notes.popleft()[1]
            if self._notes:
                self.wake()
            return data
        return None

    def _stream(self) -> None:
        """In a thread: fetch blocks until the peer is down."""
        fetcher: Fetcher | None = None
        try:
            asked: deque[tuple[Transfer, int, int]] = deque()
            while (job := self._next_job(waits=not asked)) is not None or asked:
                if job is not None:
                    fetcher = fetcher or self.fetcher()
                    fetcher.ask(*job)
                    asked.append(job)
                if fetcher is not None and (job is None or len(asked) >= self.max_asked):
                    fetcher.fetch(*asked.popleft())
        except (WireError, OSError) as error:
            timeout_s = self._transport.options.progress_timeout_s
            self._transport.lose(self, _words(error, timeout_s))
        finally:
            if fetcher is not None:
                fetcher.close()

    def _next_job(self, *, waits: bool) -> tuple[Transfer, int, int] | None:
        """(transfer, first block, number of blocks) to ask for; None: the peer is down, or, unless
        it is waited for, there is no more than the other streams can ask for."""
        with self._transport.lock:
            while not self.is_down:
                for transfer in self.transfers:
                    first, total = transfer.num_asked, transfer.num_blocks
                    most = max(1, self.batch_bytes // transfer.block_bytes)
                    if first + (0 if waits else most * self.num_streams) < total:
                        count = min(most, MAX_BATCH_BLOCKS, total - first)
                        transfer.num_asked += count
                        return transfer, first, count
                if not waits:
                    break
                self._has_job.wait()
        return None


def _words(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no progress for {timeout_s:g} s"
    return str(error) or type(error).__name__
