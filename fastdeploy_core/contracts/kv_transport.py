"""Moving KV blocks between instances.

fd-scale-out owns the state machine (leases, quarantine, retries, metrics); a transport moves bytes
and answers one hard question: when can nothing land any more? A block that a peer might still write
to is quarantined until `cancel` said SAFE or `fence` resolved."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class TransportCapabilities:
    """Unknown means unsupported."""

    read: bool = False  # the destination pulls
    write: bool = False  # the source pushes
    device_memory: bool = False
    layerwise: bool = False
    receiver_driven: bool = False  # only the destination's process ever writes the destination
    fenced: bool = False
    encrypted: bool = False
    same_host_only: bool = True
    max_regions: int = 1  # of one TransferPlan


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """How to open a transport. `secret` authenticates peers; it never leaves the host in clear."""

    secret: bytes
    model_revision: str = ""
    progress_timeout_s: float = 1.0
    max_descriptor_bytes: int = 64 * 1024
    folder: str = ""  # private 0700 folder for sockets and files; empty: the driver makes one
    address: str = ""  # HOST:PORT where it listens, over a network; empty: the driver's choice


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of an accelerator. A transport without capability `device_memory` refuses it."""

    device: str  # as its tensor library spells it, such as "cuda:0"
    address: int
    nbytes: int
    handle: bytes = b""  # what another process opens it with, where the device has such handles


@dataclass(frozen=True, slots=True)
class Region:
    """Memory to serve or fill: num_blocks blocks of block_bytes.

    Host memory is a memoryview. layout_hash names dtype, shape and order; peers with another hash
    are refused.
    """

    region_id: int
    buffer: memoryview | DeviceMemory
    block_bytes: int
    layout_hash: str
    file: int = -1  # descriptor of a memfd whose beginning the buffer is, sealed against shrinking

    @property
    def num_blocks(self) -> int:
        """Blocks in the region."""
        return self.buffer.nbytes // self.block_bytes


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Copy source_blocks[i] of the peer's region to target_blocks[i] of ours (or the reverse), in
    each of the regions named: those of layers that share block numbers travel together."""

    transfer_id: int
    attempt: int
    region_ids: Sequence[int]
    source_blocks: Sequence[int]
    target_blocks: Sequence[int]
    deadline_s: float  # seconds from submission


class TransferEventKind(enum.StrEnum):
    """What poll() can report."""

    DONE = "done"  # bytes are visible at the destination
    PROGRESS = "progress"
    FAILED = "failed"
    PEER_DOWN = "peer_down"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """One thing that happened; transfer_id 0 when it concerns a peer."""

    kind: TransferEventKind
    peer: str
    transfer_id: int = 0
    num_bytes: int = 0
    retryable: bool = False
    reason: str = ""
    note: bytes = b""


class CancelResult(enum.StrEnum):
    """SAFE: nothing of that transfer can land any more. UNSAFE: quarantine the target blocks."""

    SAFE = "safe"
    UNSAFE = "unsafe"


@dataclass(frozen=True, slots=True)
class TransportQuestion:
    """Asked of `fd_kv_transport_for`."""

    same_host: bool
    device: str
    preferred: str = ""


@runtime_checkable
class KVTransport(Protocol):
    """Constructed as `Driver(TransportOptions)`. No call blocks; progress shows in poll().

    After close() every call but close() raises ConfigError. One thread at a time calls.
    """

    name: str
    contract: tuple[int, int]
    capabilities: TransportCapabilities
    epoch: int  # random 64 bit, new at every open: old peers cannot speak to a restarted one

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory available to authenticated peers. CapabilityError for device memory without
        capability `device_memory`; ConfigError for an id that is taken, memory that is not
        contiguous, or a size that is no multiple of block_bytes."""
        ...

    def descriptor(self) -> bytes:
        """MessagePack that a peer needs to connect; carries no secret."""
        ...

    def connect(self, descriptor: bytes) -> str:
        """Start connecting to a peer and return its name; idempotent; refuses another layout,
        model revision or contract with CapabilityError, and malformed bytes with InvalidRequest."""
        ...

    def submit(self, peer: str, plan: TransferPlan) -> None:
        """Start a transfer. Before any byte moves: InvalidRequest for block ids out of range, and
        for a transfer_id that runs already with the same or a newer attempt; CapabilityError for
        more regions than `max_regions`. A newer attempt of a running transfer takes the place of
        the older one, which is cancelled first."""
        ...

    def poll(self, limit: int = 256) -> list[TransferEvent]:
        """What happened since the last call."""
        ...

    def fileno(self) -> int:
        """Readable when poll() has something; -1 when only polling works."""
        ...

    def cancel(self, transfer_id: int) -> CancelResult:
        """Stop a transfer; unknown ids are SAFE."""
        ...

    def fence(self, peer: str) -> bool:
        """True once nothing of that peer's epoch can land any more; call again until it is. The
        peer is gone from then on: its transfers have failed, and to speak to it again takes a new
        connect()."""
        ...

    def note(self, peer: str, data: bytes) -> None:
        """A control message of at most 4 KiB, ordered after the transfers submitted before it."""
        ...

    def close(self) -> None:
        """Disconnect and release every region; idempotent."""
        ...
