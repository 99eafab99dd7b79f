"""KV blocks over TCP; driver `tcp`. Receiver-driven: only the destination's own process writes the
destination, so cancel() is always SAFE and fence() is immediate. A late peer has nothing that it
could write to.

It listens at TransportOptions.address (--kv-transport-address), else where FD_KV_TCP_ADDRESS says,
"HOST" or "HOST:PORT": 127.0.0.1 and any port by default.
Peers are authenticated and frames protected against change (wire.py), not hidden from who listens.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.kv_transport import (
    CancelResult,
    DeviceMemory,
    Region,
    TransferEvent,
    TransferEventKind,
    TransferPlan,
    TransportCapabilities,
    TransportOptions,
)
from fastdeploy_core.errors import CapabilityError, ConfigError, InvalidRequest, ResourceError

from . import wire
from .peer import MAX_NOTES, Peer, Transfer
from .server import Server, peer_name

ADDRESS_VARIABLE = "FD_KV_TCP_ADDRESS"
MIN_SECRET_BYTES = 32
MAX_TRANSFERS = 4096
MAX_EVENTS = 65536
CLOCK_S = 0.02


class TcpTransport:
    """See contracts.kv_transport.KVTransport. Thread-safe."""

    name = "tcp"
    contract = (1, 0)
    capabilities = TransportCapabilities(
        read=True, receiver_driven=True, fenced=True, same_host_only=False, max_regions=16
    )

    def __init__(self, options: TransportOptions) -> None:
        if len(options.secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"the transport secret has {len(options.secret)} bytes; at least "
                f"{MIN_SECRET_BYTES} random ones are needed, for example secrets.token_bytes(32)"
            )
        self.options = options
        self.epoch = secrets.randbits(64)
        self.handshake_s = max(1.0, options.progress_timeout_s)
        self.lock = threading.RLock()  # held for at most the copy of one block
        self.regions: dict[int, tuple[Region, memoryview]] = {}
        self._transfers: dict[int, Transfer] = {}  # by the caller's id
        self._peers: dict[str, Peer] = {}
        self._threads: set[threading.Thread] = set()
        self._events: deque[TransferEvent] = deque()
        self._has_transfers = threading.Condition(self.lock)
        self._is_closed = False
        host, port = _address(options.address or os.environ.get(ADDRESS_VARIABLE, ""))
        self._host = host
        try:
            self._server = Server(self, host, port)
        except OSError as error:
            raise ConfigError(
                f"kv transport tcp cannot listen at {host}:{port}: {error.strerror}; give an "
                f"address of this host with --kv-transport-address or {ADDRESS_VARIABLE}"
            ) from error
        self._has_events = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.start(self._clock)

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory available to authenticated peers; later connections see it."""
        with self._open():
            for region in regions:
                view = _checked(region)
                if region.region_id in self.regions:
                    raise ConfigError(f"region {region.region_id} is registered already")
                self.regions[region.region_id] = (region, view)

    def descriptor(self) -> bytes:
        """MessagePack that a peer needs to connect; carries no secret."""
        with self._open():
            regions = [
                wire.RegionInfo(r.region_id, r.num_blocks, r.block_bytes, r.layout_hash)
                for r, _ in self.regions.values()
            ]
        data = wire.encode(
            wire.Descriptor(
                driver=self.name,
                protocol=wire.PROTOCOL,
                contract=CONTRACT,
                epoch=self.epoch,
                host=self._host,
                port=self._server.port,
                model_revision=self.options.model_revision,
                regions=regions,
            )
        )
        if len(data) > self.options.max_descriptor_bytes:
            raise ResourceError(
                f"the descriptor has {len(data)} bytes for {len(regions)} regions; at most "
                f"{self.options.max_descriptor_bytes} are possible (max_descriptor_bytes)"
            )
        return data

    def connect(self, descriptor: bytes) -> str:
        """Start connecting to a peer and return its name; failures show as PEER_DOWN."""
        if len(descriptor) > self.options.max_descriptor_bytes:
            raise InvalidRequest(
                f"descriptor of {len(descriptor)} bytes; at most "
                f"{self.options.max_descriptor_bytes} are possible"
            )
        try:
            there = wire.descriptor_decoder.decode(descriptor)
        except wire.DECODE_ERRORS as error:
            raise InvalidRequest(f"malformed kv transport descriptor: {error}") from None
        with self._open():
            self._check_peer(there)
            name = peer_name(there.epoch)
            if name not in self._peers:
                self._peers[name] = Peer(self, there)
            return name

    def submit(self, peer: str, plan: TransferPlan) -> None:
        """Start pulling blocks from a peer."""
        with self._open():
            there = self._known(peer)
            views = self._check_plan(plan, there.regions)
            earlier = self._transfers.get(plan.transfer_id)
            if earlier is not None:
                if plan.attempt <= earlier.plan.attempt:
                    raise InvalidRequest(
                        f"transfer {plan.transfer_id} runs already as attempt "
                        f"{earlier.plan.attempt}; got attempt {plan.attempt}"
                    )
                self.cancel(plan.transfer_id)  # a newer attempt fences the older one
            if len(self._transfers) >= MAX_TRANSFERS:
                raise ResourceError(
                    f"{MAX_TRANSFERS} transfers are under way; wait for poll() to end some"
                )
            transfer = Transfer(peer, plan, views)
            self._transfers[plan.transfer_id] = transfer
            if not len(plan.source_blocks):
                self.finish(transfer, TransferEventKind.DONE)
                return
            there.begin(transfer)
            self._has_transfers.notify_all()

    def poll(self, limit: int = 256) -> list[TransferEvent]:
        """What happened since the last call."""
        with self._open():
            found = [self._events.popleft() for _ in range(min(limit, len(self._events)))]
            if not self._events:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._has_events)
            return found

    def fileno(self) -> int:
        """Readable when poll() has something."""
        with self._open():
            return self._has_events

    def cancel(self, transfer_id: int) -> CancelResult:
        """Stop a transfer. Always SAFE: the copies are ours, and none starts after this."""
        with self._open():
            transfer = self._transfers.pop(transfer_id, None)
            if transfer is not None:
                self._forget(transfer)
            self._events = deque(e for e in self._events if e.transfer_id != transfer_id)
            return CancelResult.SAFE

    def fence(self, peer: str) -> bool:
        """End every transfer from the peer and its connections; True at once."""
        with self._open():
            there = self._peers.pop(peer, None)
            if there is not None:
                there.leave()
                for transfer in there.transfers.copy():
                    self.finish(transfer, TransferEventKind.FAILED, "the peer was fenced")
            return True

    def note(self, peer: str, data: bytes) -> None:
        """A control message, sent when the transfers submitted before it have ended."""
        if len(data) > wire.MAX_NOTE_BYTES:
            raise InvalidRequest(
                f"note of {len(data)} bytes; at most {wire.MAX_NOTE_BYTES} are possible"
            )
        with self._open():
            if not self._known(peer).note(bytes(data)):
                raise ResourceError(f"{MAX_NOTES} notes to {peer} wait already; poll and retry")

    def close(self) -> None:
        """Disconnect and release every region; nothing is written to them afterwards."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            for transfer in self._transfers.values():
                transfer.is_over = True
            for peer in self._peers.values():
                peer.leave()
            self._has_transfers.notify_all()
            threads = list(self._threads)
        self._server.close()
        for thread in threads:
            thread.join()
        with self.lock:
            self.regions.clear()
            self._events.clear()
            os.close(self._has_events)

    # For peers and the server.

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

    def layouts(self) -> dict[int, tuple[int, str]]:
        """By region: bytes of a block, layout hash."""
        with self.lock:
            return {i: (r.block_bytes, r.layout_hash) for i, (r, _) in self.regions.items()}

    def emit(self, event: TransferEvent) -> None:
        """Queue an event. Progress is dropped first when the owner does not poll."""
        with self.lock:
            is_full = len(self._events) >= MAX_EVENTS
            if self._is_closed or (is_full and event.kind is TransferEventKind.PROGRESS):
                return
            self._events.append(event)
            os.eventfd_write(self._has_events, 1)

    def finish(self, transfer: Transfer, kind: TransferEventKind, reason: str = "") -> None:
        """A transfer has ended, one way or the other; exactly one event says so."""
        with self.lock:
            if self._transfers.get(transfer.plan.transfer_id) is not transfer:
                return
            del self._transfers[transfer.plan.transfer_id]
            self._forget(transfer)
            num_bytes = transfer.num_copied * transfer.block_bytes
            failed = kind is TransferEventKind.FAILED
            self.emit(
                TransferEvent(
                    kind,
                    transfer.peer,
                    transfer.plan.transfer_id,
                    num_bytes,
                    retryable=failed,
                    reason=reason,
                )
            )

    def lose(self, peer: Peer, reason: str) -> None:
        """A connection to the peer has ended: so have all, and all transfers. Said once."""
        with self.lock:
            if peer.is_down:
                return
            if self._peers.get(peer.name) is peer:
                del self._peers[peer.name]
            peer.leave()
            for transfer in peer.transfers.copy():
                self.finish(transfer, TransferEventKind.FAILED, reason)
            self.emit(TransferEvent(TransferEventKind.PEER_DOWN, peer.name, reason=reason))

    # Our own.

    def _clock(self) -> None:
        """In a thread: end transfers whose time is over."""
        with self.lock:
            while not self._is_closed:
                now = time.monotonic()
                for transfer in [t for t in self._transfers.values() if now >= t.deadline_s]:
                    reason = f"not finished within {transfer.plan.deadline_s:g} s"
                    self.finish(transfer, TransferEventKind.FAILED, reason)
                self._has_transfers.wait(CLOCK_S if self._transfers else None)

    def _forget(self, transfer: Transfer) -> None:
        transfer.is_over = True
        there = self._peers.get(transfer.peer)
        if there is not None:
            there.end(transfer)

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        with self.lock:
            if self._is_closed:
                raise ConfigError("the kv transport is closed; open a new one")
            yield

    def _known(self, name: str) -> Peer:
        peer = self._peers.get(name)
        if peer is None:
            raise InvalidRequest(f"no connection to peer {name!r:.80}; call connect() first")
        return peer

    def _check_peer(self, there: wire.Descriptor) -> None:
        if (there.driver, there.protocol) != (self.name, wire.PROTOCOL):
            raise CapabilityError(
                f"the peer speaks {there.driver!r:.40} protocol {there.protocol}; this is "
                f"{self.name} protocol {wire.PROTOCOL}: use the same transport on both sides"
            )
        if there.contract[0] != CONTRACT[0]:
            raise CapabilityError(
                f"the peer speaks contract {there.contract}; this is {CONTRACT}: use cores of one "
                "major on both sides"
            )
        if there.model_revision != self.options.model_revision:
            raise CapabilityError(
                f"the peer serves model revision {there.model_revision!r:.80}; this is "
                f"{self.options.model_revision!r:.80}"
            )
        layouts = self.layouts()
        for region in there.regions:
            found = (region.block_bytes, region.layout_hash)
            if layouts.get(region.region_id, found) != found:
                raise CapabilityError(
                    f"the peer's region {region.region_id} has {found}, ours "
                    f"{layouts[region.region_id]}: both need the same model, dtype, block size "
                    "and ranks"
                )

    def _check_plan(
        self, plan: TransferPlan, remote: dict[int, wire.RegionInfo]
    ) -> list[tuple[memoryview, int]]:
        """Each region's bytes and those of its blocks."""
        most = self.capabilities.max_regions
        if not 1 <= len(plan.region_ids) <= most:
            raise CapabilityError(
                f"{len(plan.region_ids)} regions in one transfer; 1 to {most} are possible"
            )
        if len(plan.source_blocks) != len(plan.target_blocks):
            raise InvalidRequest(
                f"{len(plan.source_blocks)} source blocks for {len(plan.target_blocks)} targets"
            )
        views = []
        for region_id in plan.region_ids:
            if region_id not in self.regions or region_id not in remote:
                raise InvalidRequest(
                    f"region {region_id} is not registered on both sides; "
                    f"here: {sorted(self.regions)}, there: {sorted(remote)}"
                )
            region, view = self.regions[region_id]
            if view.readonly:
                raise InvalidRequest(f"region {region_id} is read-only memory")
            for what, blocks, count in (
                ("source", plan.source_blocks, remote[region_id].num_blocks),
                ("target", plan.target_blocks, region.num_blocks),
            ):
                if len(blocks) and not (min(blocks) >= 0 and max(blocks) < count):
                    raise InvalidRequest(
                        f"{what} block out of range: blocks 0 to {count - 1} exist in region "
                        f"{region_id}, got {min(blocks)} to {max(blocks)}"
                    )
            views.append((view, region.block_bytes))
        return views


def _checked(region: Region) -> memoryview:
    if isinstance(region.buffer, DeviceMemory):
        raise CapabilityError(
            f"region {region.region_id} is memory of {region.buffer.device}; this transport moves "
            "host memory"
        )
    view = memoryview(region.buffer)
    if not view.c_contiguous:
        raise ConfigError(f"region {region.region_id} is not contiguous memory")
    if region.block_bytes < 1 or view.nbytes % region.block_bytes:
        raise ConfigError(
            f"region {region.region_id} has {view.nbytes} bytes, not a multiple of block_bytes "
            f"{region.block_bytes}"
        )
    return view.cast("B")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    if port and not (port.isdecimal() and int(port) < 65536):
        raise ConfigError(
            f"{text!r:.80} is no address for kv transport tcp (--kv-transport-address, "
            f"{ADDRESS_VARIABLE}); expected HOST or HOST:PORT"
        )
    return host or "127.0.0.1", int(port or 0)
