"""The side that is read from: a thread that accepts, and one for each connection."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from fd_scale_out.receiver_driven import MAX_NOTE_BYTES, WireError, peer_name

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.kv_transport import TransferEvent, TransferEventKind

from . import wire
from .wire import Channel

if TYPE_CHECKING:
    from .transport import TcpTransport

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 256  # of peers
# Besides, of who has not proved yet to know the secret. For one more the oldest of them has to go:
# a peer proves it within milliseconds, and others can hold no place for long that it needs.
MAX_STRANGERS: Final = 128
ACCEPT_PAUSE_S: Final = 0.1  # after an error, such as too many open files
MAX_ANSWER_BYTES: Final = 1 << 30


class Server:
    """Owned by one TcpTransport."""

    def __init__(self, transport: TcpTransport, host: str, port: int) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._sockets: dict[threading.Thread, socket.socket] = {}  # of connections, by its thread
        self._strangers: dict[threading.Thread, None] = {}  # of these, the oldest first
        self._is_closed = False
        self._listener = socket.create_server((host, port), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="fd-kv-tcp", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End every connection; nothing of ours is read afterwards."""
        with self._lock:
            self._is_closed = True
            threads = list(self._sockets)
            for sock in (self._listener, *self._sockets.values()):
                _end(sock)
        for thread in (self._acceptor, *threads):
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        is_told = False
        while True:
            try:
                self._begin(self._listener.accept()[0])
                is_told = False
            except (OSError, RuntimeError) as error:  # of files, or threads, there are too many
                if self._is_closed:
                    return
                if not is_told:
                    logger.warning("kv transport tcp accepts no connection: %s", error)
                is_told = True
                time.sleep(ACCEPT_PAUSE_S)

    def _begin(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
        with self._lock:
            num_peers = len(self._sockets) - len(self._strangers)
            if self._is_closed or num_peers >= MAX_CONNECTIONS:
                sock.close()
                return
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _end(self._sockets[oldest])
            self._sockets[thread] = sock
            self._strangers[thread] = None
        try:
            thread.start()
        except RuntimeError:
            self._forget(thread)
            raise

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            sock = self._sockets.pop(thread)
            self._strangers.pop(thread, None)
        _end(sock)
        sock.close()

    def _serve(self, sock: socket.socket) -> None:
        own = threading.current_thread()
        try:
            sock.settimeout(self._transport.handshake_s)
            if self._transport.tls is not None:
                with self._lock:  # close() ends what is in there
                    secured = self._transport.tls.under(sock, is_client=False)
                    sock = self._sockets[own] = secured
                secured.do_handshake()
            channel = Channel(sock, self._transport.options.secret, is_client=False)
            with self._lock:
                self._strangers.pop(own, None)
            name = self._welcome(channel)
            channel.set_timeout(None)
            while name:
                self._answer(channel, name, channel.receive())
        except (WireError, OSError) as error:
            logger.debug("kv transport tcp: a connection ends: %s", error)
        finally:
            self._forget(own)

    def _welcome(self, channel: Channel) -> str:
        """The name of a peer that fits; empty where it was refused."""
        hello, own = channel.receive(), self._transport
        if not isinstance(hello, wire.Hello):
            raise WireError("no hello")
        refusal = ""
        if (hello.protocol, hello.major) != (wire.PROTOCOL, CONTRACT[0]):
            refusal = f"protocol {hello.protocol}, contract {hello.major} not spoken here"
        elif hello.expected_epoch != own.epoch:
            refusal = "the peer has restarted: another epoch answers"
        else:
            refusal = own.terms_refusal(hello.model_revision, hello.layouts)
        channel.send(wire.Refused(refusal) if refusal else wire.Welcome())
        return "" if refusal else peer_name(own.name, hello.epoch)

    def _answer(self, channel: Channel, name: str, message: wire.AnyMessage) -> None:
        if isinstance(message, wire.Note) and len(message.data) <= MAX_NOTE_BYTES:
            self._transport.emit(TransferEvent(TransferEventKind.NOTE, name, note=message.data))
            channel.send(wire.Pong())
        elif isinstance(message, wire.Ping):
            channel.send(wire.Pong())
        elif isinstance(message, wire.Look):
            channel.send(self._transport.shown())
        elif isinstance(message, wire.Read):
            channel.send_data(self._parts(message))
        else:
            raise WireError(f"unexpected {type(message).__name__}")

    def _parts(self, message: wire.Read) -> list[memoryview]:
        regions = []
        for region_id in message.region_ids:
            found = self._transport.regions.get(region_id)
            if found is None:
                raise WireError(f"no region {region_id}")
            region, view = found
            if not isinstance(view, memoryview):
                raise WireError(f"region {region_id} is no memory of the host")
            if not all(0 <= block < region.num_blocks for block in message.blocks):
                raise WireError("block out of range")
            regions.append((view, region.block_bytes))
        size = len(message.blocks) * sum(block_bytes for _, block_bytes in regions)
        if not 0 < size <= MAX_ANSWER_BYTES:
            raise WireError(f"{size} bytes in one answer")
        return [
            view[block * size : (block + 1) * size]
            for block in message.blocks
            for view, size in regions
        ]


def _end(sock: socket.socket) -> None:
    """A thread that waits for the peer hears of it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
