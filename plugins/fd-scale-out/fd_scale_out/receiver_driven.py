"""What KV transports share that are receiver-driven: checks of regions, peers and plans, transfers
by id and attempt, and events. Host memory unless a driver's `memory_of` knows other memory.

Only the destination's own process ever writes the destination, in `land_all`, while the transfer is
wanted; what ends a transfer waits for copies that have begun, of LANDING_BYTES at most. So cancel()
is always SAFE and fence() immediate: a late or frozen peer has nothing that it could write to. A
driver adds how peers are reached and authenticated, and how bytes travel.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

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

MIN_SECRET_BYTES: Final = 32
MAX_TRANSFERS: Final = 4096
MAX_BLOCKS_PER_TRANSFER: Final = 1 << 20
MAX_EVENTS: Final = 65536
MAX_NOTE_BYTES: Final = 4096
MAX_NOTES: Final = 256  # that wait for one peer
LANDING_BYTES: Final = 4 << 20  # copied at once, unless a block is larger
# What msgspec raises for hostile bytes: invalid UTF-8 and deep nesting have errors of their own.
DECODE_ERRORS: Final = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)


class WireError(Exception):
    """The other side does not speak as it should; the connection ends."""


class Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of what transports say to each other."""


class RegionInfo(Message):
    """A region in a descriptor."""

    region_id: int
    num_blocks: int
    block_bytes: int
    layout_hash: str


class Descriptor(Message):
    """What a peer needs to connect. Everything in it is public within the deployment."""

    driver: str
    protocol: int
    contract: tuple[int, int]
    epoch: int
    address: str
    model_revision: str
    regions: list[RegionInfo]

    @property
    def peer(self) -> str:
        """What both sides call whoever it describes."""
        return peer_name(self.driver, self.epoch)


encode = msgspec.msgpack.Encoder().encode
descriptor_decoder = msgspec.msgpack.Decoder(Descriptor)


def peer_name(driver: str, epoch: int) -> str:
    """Both sides call a peer by its epoch."""
    return f"{driver}-{epoch:016x}"


class Transfer:
    """One pull under way. `serial` is never reused, so late answers cannot be mistaken."""

    def __init__(
        self, serial: int, peer: str, plan: TransferPlan, views: list[tuple[Any, int]]
    ) -> None:
        self.serial, self.peer, self.plan = serial, peer, plan
        self.views = views  # of each region: its memory, and the bytes of a block
        self.block_bytes = sum(size for _, size in views)  # of one block in all regions
        self.num_blocks = len(plan.source_blocks)
        self.started_s = time.monotonic()
        self.deadline_s = self.started_s + plan.deadline_s
        self.num_asked = self.num_copied = 0  # blocks
        self.num_landing = 0  # threads that copy
        self.is_over = False


class ReceiverDrivenTransport(ABC):
    """See contracts.kv_transport.KVTransport. Thread-safe."""

    name: str
    contract: tuple[int, int]
    capabilities: TransportCapabilities
    protocol: int  # of the driver's messages

    def __init__(self, options: TransportOptions) -> None:
        """ConfigError for a short secret."""
        if len(options.secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"the transport secret has {len(options.secret)} bytes; at least "
                f"{MIN_SECRET_BYTES} random ones are needed, for example secrets.token_bytes(32)"
            )
        self.options = options
        self.epoch = secrets.randbits(64)
        self.handshake_s = max(1.0, options.progress_timeout_s)
        self.lock = threading.RLock()  # never held while bytes are copied
        self._has_landed = threading.Condition(self.lock)
        self.regions: dict[int, tuple[Region, Any]] = {}  # with memory_of
        self.transfers: dict[int, Transfer] = {}  # by the caller's id
        self._num_serials = 0
        self._events: deque[TransferEvent] = deque()
        self._is_closed = False
        self._has_events = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._address = self._listen()
        except BaseException:
            os.close(self._has_events)
            raise

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory available to authenticated peers; later connections see it."""
        with self._open():
            for region in regions:
                view = self.memory_of(region)
                if region.region_id in self.regions:
                    raise ConfigError(f"region {region.region_id} is registered already")
                self.regions[region.region_id] = (region, view)

    def descriptor(self) -> bytes:
        """MessagePack that a peer needs to connect; carries no secret."""
        with self._open():
            regions = [
                RegionInfo(r.region_id, r.num_blocks, r.block_bytes, r.layout_hash)
                for r, _ in self.regions.values()
            ]
        data = encode(
            Descriptor(
                driver=self.name,
                protocol=self.protocol,
                contract=CONTRACT,
                epoch=self.epoch,
                address=self._address,
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
            there = descriptor_decoder.decode(descriptor)
        except DECODE_ERRORS as error:
            raise InvalidRequest(f"malformed kv transport descriptor: {error}") from None
        with self._open():
            self._check_peer(there)
            self._connect(there)
            return there.peer

    def submit(self, peer: str, plan: TransferPlan) -> None:
        """Start pulling blocks from a peer."""
        with self._open():
            views = self._check_plan(plan, self._known_regions(peer))
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
            self._num_serials += 1
            transfer = Transfer(self._num_serials, peer, plan, views)
            self.transfers[plan.transfer_id] = transfer
            if transfer.num_blocks:
                self._begin(transfer)
            else:
                self.finish(transfer, TransferEventKind.DONE)

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
            transfer = self.transfers.pop(transfer_id, None)
            if transfer is not None:
                self._close(transfer)
                self._end(transfer)
            self._events = deque(e for e in self._events if e.transfer_id != transfer_id)
            return CancelResult.SAFE

    def fence(self, peer: str) -> bool:
        """End every transfer from the peer and its connections; True at once."""
        with self._open():
            self.fail_all(peer, "the peer was fenced")
            self._disconnect(peer)
            return True

    def note(self, peer: str, data: bytes) -> None:
        """A control message, sent when the transfers submitted before it have ended."""
        if len(data) > MAX_NOTE_BYTES:
            raise InvalidRequest(
                f"note of {len(data)} bytes; at most {MAX_NOTE_BYTES} are possible"
            )
        with self._open():
            if not self._note(peer, bytes(data)):
                raise ResourceError(f"{MAX_NOTES} notes to {peer} wait already; poll and retry")

    def close(self) -> None:
        """Disconnect and release every region; nothing is written to them afterwards."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            for transfer in self.transfers.values():
                self._close(transfer)
            self.transfers.clear()
        self._shut_down()
        with self.lock:
            self.regions.clear()
            self._events.clear()
            os.close(self._has_events)

    # What a driver does, with the lock held but for _listen and _shut_down.

    @abstractmethod
    def _listen(self) -> str:
        """Called once, at the end of the constructor: let peers connect, and say where."""

    @abstractmethod
    def _connect(self, there: Descriptor) -> None:
        """Begin a connection unless there is one; PEER_DOWN says that it failed."""

    @abstractmethod
    def _known_regions(self, peer: str) -> Mapping[int, RegionInfo]:
        """Regions of a peer that was connected to; InvalidRequest if it was not, or is lost."""

    @abstractmethod
    def _begin(self, transfer: Transfer) -> None:
        """Fetch a checked transfer's blocks, and call `land` for each."""

    @abstractmethod
    def _end(self, transfer: Transfer) -> None:
        """A transfer is over: ask for no more of it."""

    @abstractmethod
    def _disconnect(self, peer: str) -> None:
        """End the connections of a peer, without an event."""

    @abstractmethod
    def _note(self, peer: str, data: bytes) -> bool:
        """Queue a note after the transfers that there are; False: too many wait."""

    @abstractmethod
    def _shut_down(self) -> None:
        """End all connections and threads."""

    # For a driver.

    def memory_of(self, region: Region) -> Any:
        """A region's memory as transfers get it, with `nbytes` and `readonly`."""
        return host_memory(region, self.name)

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

    def land_all(self, transfer: Transfer, first: int, sources: Sequence[memoryview]) -> bool:
        """Copy what came as blocks of a transfer, from index `first` on, to their places: the only
        code that writes there. sources: of each block its parts of all regions, one after the
        other. False: they are not wanted any more. Several threads may call."""
        most = max(1, LANDING_BYTES // transfer.block_bytes)
        for begin in range(0, len(sources), most):
            part = sources[begin : begin + most]
            with self.lock:
                if transfer.is_over:
                    return False
                transfer.num_landing += 1
            try:
                for index, content in enumerate(part, first + begin):
                    block, at = int(transfer.plan.target_blocks[index]), 0
                    for view, size in transfer.views:
                        copy(view[block * size : (block + 1) * size], content[at : at + size])
                        at += size
            finally:
                with self.lock:
                    transfer.num_landing -= 1
                    self._has_landed.notify_all()
            with self.lock:
                if not transfer.is_over:
                    self.landed(transfer, len(part))
        return True

    def landed(self, transfer: Transfer, count: int) -> None:
        """So many more blocks are in their places."""
        before, total = transfer.num_copied, transfer.num_blocks
        transfer.num_copied += count
        done = transfer.num_copied
        if done == total:
            self.finish(transfer, TransferEventKind.DONE)
        elif done * 4 // total != before * 4 // total:
            self.emit(self._event(transfer, TransferEventKind.PROGRESS))

    def finish(self, transfer: Transfer, kind: TransferEventKind, reason: str = "") -> None:
        """A transfer has ended, one way or the other; exactly one event says so."""
        with self.lock:
            if self.transfers.get(transfer.plan.transfer_id) is not transfer:
                return
            del self.transfers[transfer.plan.transfer_id]
            self._close(transfer)
            self.emit(self._event(transfer, kind, reason))
            self._end(transfer)

    def fail_all(self, peer: str, reason: str) -> None:
        """All transfers from a peer have failed."""
        with self.lock:
            for transfer in [t for t in self.transfers.values() if t.peer == peer]:
                self.finish(transfer, TransferEventKind.FAILED, reason)

    def fail_late(self, now: float) -> None:
        """Transfers whose time is over have failed."""
        with self.lock:
            for transfer in [t for t in self.transfers.values() if now >= t.deadline_s]:
                reason = f"not finished within {transfer.plan.deadline_s:g} s"
                self.finish(transfer, TransferEventKind.FAILED, reason)

    def terms_refusal(self, model_revision: str, layouts: Mapping[int, tuple[int, str]]) -> str:
        """Why an authenticated peer does not fit; empty if it does."""
        if model_revision != self.options.model_revision:
            return "the peer serves another model revision"
        own = self.layouts()
        for region_id in layouts.keys() & own.keys():
            if tuple(layouts[region_id]) != own[region_id]:
                return f"region {region_id} has another layout here"
        return ""

    # Our own.

    def _close(self, transfer: Transfer) -> None:
        """Nothing of it is copied from now on."""
        transfer.is_over = True
        while transfer.num_landing:
            self._has_landed.wait()

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        with self.lock:
            if self._is_closed:
                raise ConfigError("the kv transport is closed; open a new one")
            yield

    def _event(
        self, transfer: Transfer, kind: TransferEventKind, reason: str = ""
    ) -> TransferEvent:
        return TransferEvent(
            kind,
            transfer.peer,
            transfer.plan.transfer_id,
            transfer.num_copied * transfer.block_bytes,
            retryable=kind is TransferEventKind.FAILED,
            reason=reason,
        )

    def _check_peer(self, there: Descriptor) -> None:
        if (there.driver, there.protocol) != (self.name, self.protocol):
            raise CapabilityError(
                f"the peer speaks {there.driver!r:.40} protocol {there.protocol}; this is "
                f"{self.name} protocol {self.protocol}: use the same transport on both sides"
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
        self, plan: TransferPlan, remote: Mapping[int, RegionInfo]
    ) -> list[tuple[Any, int]]:
        """Each region's memory, and the bytes of its blocks."""
        most = self.capabilities.max_regions
        if not 1 <= len(plan.region_ids) <= most:
            raise CapabilityError(
                f"{len(plan.region_ids)} regions in one transfer; 1 to {most} are possible"
            )
        if len(plan.source_blocks) != len(plan.target_blocks):
            raise InvalidRequest(
                f"{len(plan.source_blocks)} source blocks for {len(plan.target_blocks)} targets"
            )
        if len(plan.source_blocks) > MAX_BLOCKS_PER_TRANSFER:
            raise InvalidRequest(
                f"{len(plan.source_blocks)} blocks in one transfer; at most "
                f"{MAX_BLOCKS_PER_TRANSFER} are possible"
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


def copy(target: memoryview, source: memoryview) -> None:
    """Bytes, while other threads run: numpy gives the interpreter's lock back, a slice does not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def cut(content: memoryview, size: int) -> list[memoryview]:
    """Blocks that lie one after the other."""
    return [content[at : at + size] for at in range(0, len(content), size)]


def host_memory(region: Region, driver: str) -> memoryview:
    """The bytes of a region; CapabilityError where they are not the host's."""
    if isinstance(region.buffer, DeviceMemory):
        raise CapabilityError(
            f"region {region.region_id} is memory of {region.buffer.device}; transport {driver} "
            "moves host memory"
        )
    view = memoryview(region.buffer)
    if not view.c_contiguous:
        raise ConfigError(f"region {region.region_id} is not contiguous memory")
    check_size(region)
    return view.cast("B")


def check_size(region: Region) -> None:
    """ConfigError for one that is not whole blocks."""
    if region.block_bytes < 1 or region.buffer.nbytes % region.block_bytes:
        raise ConfigError(
            f"region {region.region_id} has {region.buffer.nbytes} bytes, not a multiple of "
            f"block_bytes {region.block_bytes}"
        )
