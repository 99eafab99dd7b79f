"""What a shared-memory transport remembers of transfers and peers; guarded by its lock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastdeploy_core.contracts.kv_transport import TransferPlan

from . import wire

if TYPE_CHECKING:
    from .link import Link


@dataclass(slots=True, eq=False)
class Transfer:
    """One pull under way. `serial` is never reused, so late answers cannot be mistaken."""

    serial: int
    peer: str
    plan: TransferPlan
    view: memoryview
    block_bytes: int
    submitted: float
    num_requested: int = 0
    num_copied: int = 0
    num_bytes: int = 0
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Peer:
    """A peer we connected to, or that connected to us."""

    name: str
    regions: dict[int, wire.RegionInfo] = field(default_factory=dict)
    outbound: Link | None = None  # we pull through this one
    inbound: Link | None = None
    waiting: deque[tuple[frozenset[int], bytes]] = field(default_factory=deque)  # notes
    last_progress: float = 0.0
