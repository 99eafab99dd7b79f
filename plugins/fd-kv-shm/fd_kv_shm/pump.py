"""The thread of a shared-memory transport: accepts, connects, copies blocks, watches deadlines.

The transport's lock guards all shared state, and is not held while blocks are copied.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fd_scale_out.receiver_driven import (
    MAX_NOTE_BYTES,
    MAX_NOTES,
    Descriptor,
    RegionInfo,
    Transfer,
    WireError,
)

from fastdeploy_core.contracts.kv_transport import TransferEvent, TransferEventKind
from fastdeploy_core.errors import InvalidRequest

from . import wire
from .destination import Destination
from .link import MAX_ACTIVE_TRANSFERS, Link, peer_uid, short_path
from .source import Source

if TYPE_CHECKING:
    from .shm import SharedMemoryTransport

logger = logging.getLogger(__name__)

MAX_LINKS: Final = 256
_TICK_S: Final = 0.05


@dataclass(slots=True, eq=False)
class Peer:
    """A peer we connected to, or that connected to us."""

    regions: dict[int, RegionInfo] = field(default_factory=dict)
    outbound: Link | None = None  # we pull through this one
    inbound: Link | None = None
    waiting: deque[tuple[frozenset[int], bytes]] = field(default_factory=deque)  # notes
    last_progress: float = 0.0


class Pump:
    """Owned by one SharedMemoryTransport; methods without `_` are called with its lock held."""

    def __init__(self, transport: SharedMemoryTransport, address: str) -> None:
        self._transport = transport
        self._lock = transport.lock
        self._source = Source(transport)
        self._destination = Destination(transport, self)
        self.peers: dict[str, Peer] = {}
        self.by_serial: dict[int, Transfer] = {}
        self._links: set[Link] = set()
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(address) as path:
                self._listener.bind(path)
            Path(address).chmod(0o600)
            self._listener.listen(64)
        except OSError:
            self._listener.close()
            os.close(self._wake)
            raise
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="fd-kv-shm", daemon=True)
        self._thread.start()

    def connect(self, descriptor: Descriptor) -> None:
        """Begin a link to the peer unless there is one; failures show as PEER_DOWN."""
        name = descriptor.peer
        peer = self.peers.setdefault(name, Peer())
        peer.regions = {r.region_id: r for r in descriptor.regions}
        if peer.outbound is not None and not peer.outbound.closed_reason:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            with short_path(descriptor.address) as path:
                sock.connect(path)
        except (OSError, ValueError) as error:
            sock.close()
            self._down(name, f"cannot connect: {error}")
            return
        link = Link(sock, "client", self._transport, peer=name, peer_epoch=descriptor.epoch)
        peer.outbound = link
        self._add(link)

    def remote_regions(self, peer: str) -> dict[int, RegionInfo]:
        """Regions of a peer we are connected (or connecting) to."""
        known = self.peers.get(peer)
        if known is None or known.outbound is None or known.outbound.closed_reason:
            raise InvalidRequest(f"no connection to peer {peer!r:.80}; call connect() first")
        return known.regions

    def start(self, transfer: Transfer) -> None:
        """Begin a checked transfer."""
        self.by_serial[transfer.serial] = transfer
        self.wake()

    def forget(self, transfer: Transfer) -> None:
        """Out of the table: from now on no copy for it can start."""
        if self.by_serial.pop(transfer.serial, None) is None:
            return
        peer = self.peers.get(transfer.peer)
        link = peer.outbound if peer else None
        unfinished = transfer.num_copied < transfer.num_asked
        if unfinished and link is not None and link.is_open and not link.closed_reason:
            try:
                link.send(wire.Drop(transfer.serial))
            except WireError as error:
                self._end(link, str(error))
        self.wake()

    def disconnect(self, name: str, reason: str) -> None:
        """End both links of a peer without an event: the caller asked for it."""
        peer = self.peers.pop(name, None)
        for link in (peer.outbound, peer.inbound) if peer else ():
            if link is not None:
                self._detach(link, reason)
        self.wake()

    def note(self, name: str, data: bytes) -> bool:
        """Queue a note after the peer's transfers; False when too many wait."""
        peer = self.peers.get(name)
        if peer is None or not any((peer.outbound, peer.inbound)):
            raise InvalidRequest(f"no connection to peer {name!r:.80}; call connect() first")
        if len(peer.waiting) >= MAX_NOTES:
            return False
        before = frozenset(t.serial for t in self.by_serial.values() if t.peer == name)
        peer.waiting.append((before, data))
        self.wake()
        return True

    def wake(self) -> None:
        """Make the thread look at its work."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop the thread and close every link. Called without the lock."""
        with self._lock:
            self._stopping = True
            self.wake()
        self._thread.join()
        self._destination.close()
        with self._lock:
            for link in list(self._links):
                link.close("the peer has closed its transport")
            self._selector.close()
            self._listener.close()
            os.close(self._wake)

    # From here on: the thread.

    def _run(self) -> None:
        next_check = 0.0
        while not self._stopping:
            try:
                self._turn()
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + _TICK_S
                    with self._lock:
                        self._check_deadlines()
            except Exception:  # a bug must not leave transfers without an answer
                logger.exception("kv transport shm: internal error, all links are closed")
                with self._lock:
                    for link in list(self._links):
                        self._end(link, "internal error")

    def _turn(self) -> None:
        """Wait for something and do one share of it for every link."""
        with self._lock:
            busy = False
            for link in list(self._links):
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outgoing else 0)
                self._selector.modify(link, events)
                busy |= bool(link.queue and link.free_slots)
            idle = not self.by_serial and not any(not k.is_open for k in self._links)
        timeout = 0.0 if busy else (None if idle else _TICK_S)
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, Link):
                self._read(key.fileobj)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
        for link in list(self._links):
            self._guarded(link, self._work)

    def _read(self, link: Link) -> None:
        def read(link: Link) -> None:
            with self._lock:
                if link.closed_reason:
                    return
                was_open = link.is_open
                messages = link.receive()
                if link.is_open and not was_open and link.role == "server":
                    self._greet(link)
            for message in messages:
                self._handle(link, message)

        self._guarded(link, read)

    def _guarded(self, link: Link, work: Callable[[Link], None]) -> None:
        try:
            work(link)
        except (WireError, OSError) as error:
            with self._lock:
                self._end(link, str(error))

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            with self._lock:
                if len(self._links) >= MAX_LINKS or peer_uid(sock) not in (os.getuid(), 0):
                    sock.close()
                    return
                self._add(Link(sock, "server", self._transport))

    def _greet(self, link: Link) -> None:
        """An authenticated peer has connected to us."""
        peer = self.peers.setdefault(link.peer, Peer())
        if peer.inbound is not None:
            self._detach(peer.inbound, "replaced by a newer connection")
        peer.inbound = link

    def _work(self, link: Link) -> None:
        """Send what is due on one link."""
        with self._lock:
            if link.closed_reason:
                return
            if link.is_open:
                if link.role == "client":
                    mine = (t for t in self.by_serial.values() if t.peer == link.peer)
                    for transfer in itertools.islice(mine, MAX_ACTIVE_TRANSFERS):
                        self._destination.request(link, transfer)
                self._send_notes(link.peer)
        if link.is_open and link.role == "server":
            self._source.stage(link)
        with self._lock:
            if not link.closed_reason:
                link.flush()

    def _send_notes(self, name: str) -> None:
        peer = self.peers.get(name)
        if peer is None:
            return
        link = next((k for k in (peer.outbound, peer.inbound) if k and k.is_open), None)
        while link is not None and peer.waiting:
            before, data = peer.waiting[0]
            if not before.isdisjoint(self.by_serial):
                return
            peer.waiting.popleft()
            link.send(wire.Note(data))
            link.flush()

    def _handle(self, link: Link, message: wire.AnyMessage) -> None:
        if isinstance(message, wire.Note):
            if len(message.data) > MAX_NOTE_BYTES:
                raise WireError(f"note of {len(message.data)} bytes")
            with self._lock:
                self._transport.emit(
                    TransferEvent(TransferEventKind.NOTE, link.peer, note=message.data)
                )
        elif link.role == "client" and isinstance(message, wire.Ready):
            self._destination.copy(link, message)
        elif link.role == "client" and isinstance(message, wire.Here):
            self._destination.take(link, message)
        elif link.role == "client" and isinstance(message, wire.Refused):
            with self._lock:
                transfer = self.by_serial.get(message.serial)
                if transfer is not None and transfer.peer == link.peer:
                    reason = f"the peer refuses: {message.reason[:200]}"
                    self._transport.finish(transfer, TransferEventKind.FAILED, reason)
        elif link.role == "server" and isinstance(message, wire.Read):
            self._source.queue(link, message)
        elif link.role == "server" and isinstance(message, wire.Free):
            self._source.free(link, message.slots)
        elif link.role == "server" and isinstance(message, wire.Drop):
            self._source.drop(link, message.serial)
        else:
            raise WireError(f"unexpected {type(message).__name__} from a {link.role}'s peer")

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        timeout_s = self._transport.options.progress_timeout_s
        self._transport.fail_late(now)
        for transfer in list(self.by_serial.values()):
            peer = self.peers.get(transfer.peer)
            # A peer's progress counts for all its transfers, because they wait for one another.
            moved = max(transfer.started_s, peer.last_progress if peer else 0.0)
            if now >= moved + timeout_s:
                reason = f"no progress for {timeout_s:g} s"
                self._transport.finish(transfer, TransferEventKind.FAILED, reason)
        for link in list(self._links):
            if not link.is_open and not link.closed_reason and now >= link.deadline:
                self._end(link, f"no answer to the handshake within {link.own.handshake_s:g} s")

    def _add(self, link: Link) -> None:
        self._links.add(link)
        self._selector.register(link, selectors.EVENT_READ)
        self.wake()

    def _detach(self, link: Link, reason: str) -> None:
        """Unregister before closing: the number of a closed socket may be in use again at once."""
        self._links.discard(link)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link)
        link.close(reason)

    def _end(self, link: Link, reason: str) -> None:
        """A link is over: its transfers fail, its peer is reported once."""
        if link.closed_reason:
            return
        self._detach(link, reason)
        peer = self.peers.get(link.peer)
        if peer is None or link not in (peer.outbound, peer.inbound):
            if not link.is_open and link.role == "server":
                logger.warning("kv transport shm: a connection was refused: %s", reason)
            return
        if link is peer.inbound:
            peer.inbound = None
            if peer.outbound is not None:
                return  # the other link reports, if it too is gone
        else:
            peer.outbound = None
        self._down(link.peer, reason)

    def _down(self, name: str, reason: str) -> None:
        self._transport.fail_all(name, f"the peer is down: {reason}")
        peer = self.peers.get(name)
        if peer is not None and peer.outbound is None and peer.inbound is None:
            peer.waiting.clear()
            del self.peers[name]
        self._transport.emit(
            TransferEvent(TransferEventKind.PEER_DOWN, name, retryable=True, reason=reason)
        )
