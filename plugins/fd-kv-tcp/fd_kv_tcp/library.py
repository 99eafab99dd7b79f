"""What transports share whose bytes a library moves: fd-kv-nixl, fd-kv-mooncake.

Such libraries authenticate nobody, notice a frozen peer late or never, and may write to memory long
after a transfer was given up. So this transport keeps the connections of `tcp` to a peer: they
prove who is there, carry notes, and notice within `progress_timeout_s` that it is gone. What the
library needs to know of a peer travels in them. And the library writes landing areas alone, never
blocks: `land` copies from there what is still wanted. An area is not used again before the library
is done with it or has been shut down, so whatever comes late meets nothing.
"""

from __future__ import annotations

import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
from fd_scale_out.receiver_driven import Transfer, WireError, cut

from fastdeploy_core.contracts.kv_transport import Region, TransportOptions

from . import wire
from .peer import Fetcher, Peer
from .transport import TcpTransport
from .wire import Channel

LANDING_BYTES: Final = 8 << 20  # unless a block is larger
LOOK_S: Final = 0.5  # while a read lasts, the peer is told that it is still under way

Span = tuple[int, int]  # address, bytes


class Reader(Protocol):
    """Reads memory of one peer, for one thread."""

    def read(self, spans: Sequence[Span], landing: int, look: Callable[[], None]) -> None:
        """Copy the peer's spans one after the other to the address `landing`. `look` is called
        every now and then, and raises once the peer is gone. WireError: it has failed, and close()
        comes next."""
        ...

    def close(self) -> bool:
        """Whether the library writes nothing any more that this reader asked for."""
        ...


class Library(Protocol):
    """One transport's use of a library. Several threads call."""

    def register(self, address: int, num_bytes: int) -> None:
        """Memory that peers may read."""
        ...

    def shown(self) -> bytes:
        """What a peer's `reader` needs. A peer is about to read, or still does. WireError once
        closed."""
        ...

    def reader(self, shown: bytes, landing: memoryview) -> Reader:
        """Reads from the peer that showed this."""
        ...

    def close(self) -> None:
        """From then on nothing of ours is read or written. Readers are closed before."""
        ...


class LibraryTransport(TcpTransport, ABC):
    """See contracts.kv_transport.KVTransport. Thread-safe."""

    max_spans = 16384  # of one read

    def __init__(self, options: TransportOptions) -> None:
        """CapabilityError where the library is missing."""
        self.library = self.open_library(options)
        self.peer_type = _LibraryPeer
        self.addresses: dict[int, int] = {}  # by region
        self._registered: set[Span] = set()
        self._kept: list[memoryview] = []  # that the library may still write to
        try:
            super().__init__(options)
        except BaseException:
            self.library.close()
            raise

    @abstractmethod
    def open_library(self, options: TransportOptions) -> Library:
        """Import and open it; CapabilityError with what to install."""

    def register(self, regions: Sequence[Region]) -> None:
        """As the contract says."""
        with self.lock:
            super().register(regions)
            for region in regions:
                view = self.regions[region.region_id][1]
                if view.nbytes:
                    address = address_of(view)
                    if (address, view.nbytes) not in self._registered:  # in blocks of other sizes
                        self.library.register(address, view.nbytes)
                        self._registered.add((address, view.nbytes))
                    self.addresses[region.region_id] = address

    def shown(self) -> wire.Shown:
        """What peers need whose library reads from here."""
        with self.lock:
            addresses = dict(self.addresses)
        return wire.Shown(addresses, self.library.shown())

    def keep(self, landing: memoryview) -> None:
        """The library may still write to this area: it is freed after the library."""
        with self.lock:
            self._kept.append(landing)

    def _shut_down(self) -> None:
        super()._shut_down()
        self.library.close()
        self._kept.clear()


class _LibraryPeer(Peer):
    num_streams = 2  # while one copies to blocks, the other one reads
    max_asked = 1
    batch_bytes = LANDING_BYTES
    _transport: LibraryTransport

    def fetcher(self) -> Fetcher:
        return _Reads(self._transport, self)


class _Reads:
    """A Fetcher: a reader of the library, and the area that it writes to."""

    def __init__(self, transport: LibraryTransport, peer: _LibraryPeer) -> None:
        self._transport, self._peer = transport, peer
        self._channel: Channel = peer.connect()
        self._shown: wire.Shown | None = None
        self._reader: Reader | None = None
        self._landing = memoryview(b"")
        self._looked_s = 0.0

    def ask(self, transfer: Transfer, first: int, count: int) -> None:
        """The library reads when `fetch` says so."""

    def fetch(self, transfer: Transfer, first: int, count: int) -> None:
        blocks = [int(b) for b in transfer.plan.source_blocks[first : first + count]]
        size = count * transfer.block_bytes
        shown = self._look()
        if shown != self._shown or size > len(self._landing) or self._reader is None:
            self.close()
            self._landing = memoryview(mmap.mmap(-1, max(LANDING_BYTES, size)))
            self._reader = self._transport.library.reader(shown.data, self._landing)
            self._shown = shown
        sizes = [size for _, size in transfer.views]
        begins = [shown.addresses.get(region_id, 0) for region_id in transfer.plan.region_ids]
        if not all(begins):
            raise WireError("the peer shows no memory of a region")
        spans = [
            (begin + block * size, size)
            for block in blocks
            for begin, size in zip(begins, sizes, strict=True)
        ]
        at = address_of(self._landing)
        most = self._transport.max_spans
        for begin in range(0, len(spans), most):
            part = spans[begin : begin + most]
            self._reader.read(part, at, self._still_there)
            at += sum(size for _, size in part)
        come = cut(self._landing[:size], transfer.block_bytes)
        self._transport.land_all(transfer, first, come)

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.close():
            self._transport.keep(self._landing)

    def _look(self) -> wire.Shown:
        answer = self._channel.ask(wire.Look())
        if not isinstance(answer, wire.Shown):
            raise WireError("the peer has no library to read with")
        self._looked_s = time.monotonic()
        return answer

    def _still_there(self) -> None:
        if self._peer.is_down:
            raise WireError("no longer wanted")
        if time.monotonic() - self._looked_s > LOOK_S:
            self._look()


def address_of(view: memoryview) -> int:
    """Where it begins."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
