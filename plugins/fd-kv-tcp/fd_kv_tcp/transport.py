"""KV blocks over TCP; driver `tcp`.

It listens at TransportOptions.address (--kv-transport-address), else where FD_KV_TCP_ADDRESS says,
"HOST" or "HOST:PORT": 127.0.0.1 and any port by default.
Peers are authenticated and frames protected against change (wire.py). With FD_KV_TCP_TLS (tls.py)
they are hidden from who listens, too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from fd_scale_out.receiver_driven import (
    Descriptor,
    ReceiverDrivenTransport,
    RegionInfo,
    Transfer,
    WireError,
)

from fastdeploy_core.contracts.kv_transport import (
    TransferEvent,
    TransferEventKind,
    TransportCapabilities,
    TransportOptions,
)
from fastdeploy_core.errors import ConfigError, InvalidRequest

from . import wire
from .peer import Peer
from .server import Server
from .tls import from_environment

ADDRESS_VARIABLE = "FD_KV_TCP_ADDRESS"
CLOCK_S = 0.02
_WITH_TLS = 1000  # more, so that instances with and without it refuse each other before they talk


class TcpTransport(ReceiverDrivenTransport):
    """See contracts.kv_transport.KVTransport. Thread-safe."""

    name = "tcp"
    contract = (1, 0)
    capabilities = TransportCapabilities(
        read=True, receiver_driven=True, fenced=True, same_host_only=False, max_regions=16
    )
    protocol = wire.PROTOCOL
    peer_type = Peer

    def __init__(self, options: TransportOptions) -> None:
        self._peers: dict[str, Peer] = {}
        self._threads: set[threading.Thread] = set()
        self.tls = from_environment()
        if self.tls is not None:
            self.capabilities = replace(self.capabilities, encrypted=True)
            self.protocol = _WITH_TLS + wire.PROTOCOL
        super().__init__(options)

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread that close() waits for."""

        def run() -> None:
            try:
                work()
            finally:
                with self.lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="fd-kv-tcp", daemon=True)
        with self.lock:
            self._threads.add(thread)
            thread.start()

    def shown(self) -> wire.Shown:
        """What peers need whose library reads from here."""
        raise WireError("no library reads from here")

    def lose(self, peer: Peer, reason: str) -> None:
        """A connection to the peer has ended: so have all, and all transfers. Said once."""
        with self.lock:
            if peer.is_down:
                return
            if self._peers.get(peer.name) is peer:
                del self._peers[peer.name]
            peer.leave()
            self.fail_all(peer.name, reason)
            self.emit(TransferEvent(TransferEventKind.PEER_DOWN, peer.name, reason=reason))

    def _listen(self) -> str:
        host, port = _address(self.options.address or os.environ.get(ADDRESS_VARIABLE, ""))
        try:
            self._server = Server(self, host, port)
        except OSError as error:
            raise ConfigError(
                f"kv transport {self.name} cannot listen at {host}:{port}: {error.strerror}; give "
                f"an address of this host with --kv-transport-address or {ADDRESS_VARIABLE}"
            ) from error
        self._has_transfers = threading.Condition(self.lock)
        self.start(self._clock)
        return f"{host}:{self._server.port}"

    def _connect(self, there: Descriptor) -> None:
        if there.peer not in self._peers:
            self._peers[there.peer] = self.peer_type(self, there)

    def _known_regions(self, peer: str) -> Mapping[int, RegionInfo]:
        return self._known(peer).regions

    def _begin(self, transfer: Transfer) -> None:
        self._known(transfer.peer).begin(transfer)
        self._has_transfers.notify_all()

    def _end(self, transfer: Transfer) -> None:
        there = self._peers.get(transfer.peer)
        if there is not None:
            there.end(transfer)

    def _disconnect(self, peer: str) -> None:
        there = self._peers.pop(peer, None)
        if there is not None:
            there.leave()

    def _note(self, peer: str, data: bytes) -> bool:
        return self._known(peer).note(data)

    def _shut_down(self) -> None:
        with self.lock:
            for peer in self._peers.values():
                peer.leave()
            self._has_transfers.notify_all()
            threads = list(self._threads)
        self._server.close()
        for thread in threads:
            thread.join()

    def _clock(self) -> None:
        """In a thread: end transfers whose time is over."""
        with self.lock:
            while not self._is_closed:
                self.fail_late(time.monotonic())
                self._has_transfers.wait(CLOCK_S if self.transfers else None)

    def _known(self, name: str) -> Peer:
        peer = self._peers.get(name)
        if peer is None:
            raise InvalidRequest(f"no connection to peer {name!r:.80}; call connect() first")
        return peer


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    if port and not (port.isdecimal() and int(port) < 65536):
        raise ConfigError(
            f"{text!r:.80} is no address for kv transport tcp (--kv-transport-address, "
            f"{ADDRESS_VARIABLE}); expected HOST or HOST:PORT"
        )
    return host or "127.0.0.1", int(port or 0)
