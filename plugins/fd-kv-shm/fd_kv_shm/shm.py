"""KV blocks between processes of one host through shared memory; driver `shm`. Receiver-driven:
only the destination's own process ever writes the destination, so cancel() is always SAFE and
fence() is immediate: a late or frozen peer has nothing that it could write to.

A source copies requested blocks into a sealed staging area, the destination copies them out. One
thread per transport does all of it; see link.py for sockets and wire.py for messages.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

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
from fastdeploy_core.devices.host_communicator import check_private
from fastdeploy_core.errors import CapabilityError, ConfigError, InvalidRequest, ResourceError

from . import wire
from .pump import MAX_NOTES, Pump
from .state import Transfer

MIN_SECRET_BYTES = 32
MAX_TRANSFERS = 4096
MAX_BLOCKS_PER_TRANSFER = 1 << 20
MAX_EVENTS = 65536


class SharedMemoryTransport:
    """See contracts.kv_transport.KVTransport. Thread-safe."""

    name = "shm"
    contract = (1, 0)
    capabilities = TransportCapabilities(
        read=True, receiver_driven=True, fenced=True, same_host_only=True
    )

    def __init__(self, options: TransportOptions) -> None:
        if not hasattr(os, "memfd_create"):
            raise CapabilityError(
                "kv transport 'shm' needs sealed shared memory (memfd_create), which this "
                "operating system lacks; choose another with: fastdeploy plugins list"
            )
        if len(options.secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"the transport secret has {len(options.secret)} bytes; at least "
                f"{MIN_SECRET_BYTES} random ones are needed, for example secrets.token_bytes(32)"
            )
        self.options = options
        self.epoch = secrets.randbits(64)
        self.lock = threading.RLock()  # held for at most the copy of one block
        self.regions: dict[int, tuple[Region, memoryview]] = {}
        self.transfers: dict[int, Transfer] = {}  # by the caller's transfer id
        self._events: deque[TransferEvent] = deque()
        self._has_events = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._made_folder = not options.folder
        self._folder = Path(options.folder or tempfile.mkdtemp(prefix="fastdeploy-kv-"))
        self._closed = False
        try:
            check_private(self._folder, "open the transport")
            self._address = self._folder / f"kv-{self.epoch:016x}.sock"
            self._pump = Pump(self, str(self._address))
        except BaseException:
            os.close(self._has_events)
            self._remove_folder()
            raise

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory available to authenticated peers; later connections see it."""
        with self.lock:
            self._check_open()
            for region in regions:
                if isinstance(region.buffer, DeviceMemory):
                    raise CapabilityError(
                        f"region {region.region_id} is memory of {region.buffer.device}; this "
                        "transport moves host memory"
                    )
                view = memoryview(region.buffer)
                if not view.c_contiguous:
                    raise ConfigError(f"region {region.region_id} is not contiguous memory")
                if region.block_bytes < 1 or view.nbytes % region.block_bytes:
                    raise ConfigError(
                        f"region {region.region_id} has {view.nbytes} bytes, not a multiple of "
                        f"block_bytes {region.block_bytes}"
                    )
                if region.region_id in self.regions:
                    raise ConfigError(f"region {region.region_id} is registered already")
                self.regions[region.region_id] = (region, view.cast("B"))

    def descriptor(self) -> bytes:
        """MessagePack that a peer needs to connect; carries no secret."""
        with self.lock:
            self._check_open()
            data = wire.encode(
                wire.Descriptor(
                    driver=self.name,
                    protocol=wire.PROTOCOL,
                    contract=CONTRACT,
                    epoch=self.epoch,
                    address=str(self._address.absolute()),
                    model_revision=self.options.model_revision,
                    regions=[
                        wire.RegionInfo(r.region_id, r.num_blocks, r.block_bytes, r.layout_hash)
                        for r, _ in self.regions.values()
                    ],
                )
            )
        if len(data) > self.options.max_descriptor_bytes:
            raise ResourceError(
                f"the descriptor has {len(data)} bytes for {len(self.regions)} regions; at most "
                f"{self.options.max_descriptor_bytes} are possible (max_descriptor_bytes)"
            )
        return data

    def connect(self, descriptor: bytes) -> str:
        """Start connecting to a peer and return its name."""
        if len(descriptor) > self.options.max_descriptor_bytes:
            raise InvalidRequest(
                f"descriptor of {len(descriptor)} bytes; at most "
                f"{self.options.max_descriptor_bytes} are possible"
            )
        try:
            peer = wire.descriptor_decoder.decode(descriptor)
        except wire.DECODE_ERRORS as error:
            raise InvalidRequest(f"malformed kv transport descriptor: {error}") from None
        with self.lock:
            self._check_open()
            self._check_peer(peer)
            return self._pump.connect(peer)

    def submit(self, peer: str, plan: TransferPlan) -> None:
        """Start pulling blocks from a peer."""
        with self.lock:
            self._check_open()
            remote = self._pump.remote_regions(peer)
            view = self._check_plan(plan, remote)
            earlier = self.transfers.get(plan.transfer_id)
            if earlier is not None:
                if plan.attempt <= earlier.plan.attempt:
                    raise InvalidRequest(
                        f"transfer {plan.transfer_id} runs already as attempt "
                        f"{earlier.plan.attempt}; got attempt {plan.attempt}"
                    )
                self.cancel(plan.transfer_id)  # a newer attempt fences the older one
            if len(self.transfers) >= MAX_TRANSFERS:
                raise ResourceError(
                    f"{MAX_TRANSFERS} transfers are under way; wait for poll() to end some"
                )
            self._pump.start(peer, plan, view)

    def poll(self, limit: int = 256) -> list[TransferEvent]:
        """What happened since the last call."""
        with self.lock:
            found = [self._events.popleft() for _ in range(min(limit, len(self._events)))]
            if not self._events and not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._has_events)
            return found

    def fileno(self) -> int:
        """Readable when poll() has something."""
        self._check_open()
        return self._has_events

    def cancel(self, transfer_id: int) -> CancelResult:
        """Stop a transfer. Always SAFE: the copies are ours, and none starts after this."""
        with self.lock:
            transfer = self.transfers.pop(transfer_id, None)
            if transfer is not None and not self._closed:
                self._pump.drop(transfer)
            self._events = deque(e for e in self._events if e.transfer_id != transfer_id)
            return CancelResult.SAFE

    def fence(self, peer: str) -> bool:
        """End every transfer from the peer and its connection; True at once."""
        with self.lock:
            for transfer in [t for t in self.transfers.values() if t.peer == peer]:
                self.finish(transfer, TransferEventKind.FAILED, "the peer was fenced")
            if not self._closed:
                self._pump.disconnect(peer, "fenced")
            return True

    def note(self, peer: str, data: bytes) -> None:
        """A control message, sent when the transfers submitted before it have ended."""
        if len(data) > wire.MAX_NOTE_BYTES:
            raise InvalidRequest(
                f"note of {len(data)} bytes; at most {wire.MAX_NOTE_BYTES} are possible"
            )
        with self.lock:
            self._check_open()
            if not self._pump.note(peer, bytes(data)):
                raise ResourceError(f"{MAX_NOTES} notes to {peer} wait already; poll and retry")

    def close(self) -> None:
        """Disconnect and release every region; nothing is written to them afterwards."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self.transfers.clear()
        self._pump.close()
        with self.lock:
            self.regions.clear()
            self._events.clear()
            os.close(self._has_events)
        with contextlib.suppress(OSError):
            self._address.unlink()
        self._remove_folder()

    # For the pump, called with the lock held.

    def emit(self, event: TransferEvent) -> None:
        """Queue an event. Progress is dropped first when the owner does not poll."""
        if self._closed:
            return
        full = len(self._events) >= MAX_EVENTS
        if full and event.kind is TransferEventKind.PROGRESS:
            return
        self._events.append(event)
        os.eventfd_write(self._has_events, 1)

    def finish(self, transfer: Transfer, kind: TransferEventKind, reason: str = "") -> None:
        """A transfer has ended, one way or the other; exactly one event says so."""
        if self.transfers.get(transfer.plan.transfer_id) is not transfer:
            return
        del self.transfers[transfer.plan.transfer_id]
        transfer.is_over = True
        self.emit(
            TransferEvent(
                kind,
                transfer.peer,
                transfer.plan.transfer_id,
                transfer.num_bytes,
                retryable=kind is TransferEventKind.FAILED,
                reason=reason,
            )
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceError("the kv transport is closed; open a new one")

    def _check_peer(self, peer: wire.Descriptor) -> None:
        if peer.driver != self.name or peer.protocol != wire.PROTOCOL:
            raise CapabilityError(
                f"peer speaks {peer.driver} protocol {peer.protocol}; this is {self.name} "
                f"protocol {wire.PROTOCOL}: use the same transport on both sides"
            )
        if peer.contract[0] != CONTRACT[0]:
            raise CapabilityError(
                f"peer speaks contract {peer.contract[0]}.{peer.contract[1]}; this is "
                f"{CONTRACT[0]}.{CONTRACT[1]}: use the same core on both sides"
            )
        if peer.model_revision != self.options.model_revision:
            raise CapabilityError(
                f"peer serves model revision {peer.model_revision!r:.80}; this is "
                f"{self.options.model_revision!r:.80}"
            )
        for remote in peer.regions:
            if remote.region_id not in self.regions:
                continue
            own = self.regions[remote.region_id][0]
            if (remote.layout_hash, remote.block_bytes) != (own.layout_hash, own.block_bytes):
                raise CapabilityError(
                    f"peer's region {remote.region_id} has layout {remote.layout_hash!r:.80} with "
                    f"{remote.block_bytes} bytes per block; ours has {own.layout_hash!r:.80} with "
                    f"{own.block_bytes}: both need the same model, dtype, block size and ranks"
                )

    def _check_plan(self, plan: TransferPlan, remote: dict[int, wire.RegionInfo]) -> memoryview:
        if len(plan.region_ids) != 1:
            raise CapabilityError(
                f"{len(plan.region_ids)} regions in one transfer; this transport moves blocks of "
                "one region (max_regions 1): submit one transfer for each"
            )
        region_id = plan.region_ids[0]
        if region_id not in self.regions or region_id not in remote:
            raise InvalidRequest(
                f"region {region_id} is not registered on both sides; "
                f"here: {sorted(self.regions)}, there: {sorted(remote)}"
            )
        region, view = self.regions[region_id]
        if view.readonly:
            raise InvalidRequest(f"region {region_id} is read-only memory")
        if len(plan.source_blocks) != len(plan.target_blocks):
            raise InvalidRequest(
                f"{len(plan.source_blocks)} source blocks for {len(plan.target_blocks)} targets"
            )
        if len(plan.source_blocks) > MAX_BLOCKS_PER_TRANSFER:
            raise InvalidRequest(
                f"{len(plan.source_blocks)} blocks in one transfer; at most "
                f"{MAX_BLOCKS_PER_TRANSFER} are possible"
            )
        for what, blocks, count in (
            ("source", plan.source_blocks, remote[region_id].num_blocks),
            ("target", plan.target_blocks, region.num_blocks),
        ):
            if len(blocks) and not (min(blocks) >= 0 and max(blocks) < count):
                raise InvalidRequest(
                    f"{what} block out of range: blocks 0 to {count - 1} exist in region "
                    f"{region_id}, got {min(blocks)} to {max(blocks)}"
                )
        return view

    def _remove_folder(self) -> None:
        if self._made_folder:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
