"""KV blocks moved by the Mooncake transfer engine; driver `mooncake`.

Who reaches the engine's port can read and overwrite what is registered with it, so a network that
strangers reach must not be used; the hook says so, and the transport is taken by its name alone.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from fd_kv_tcp.library import Library, LibraryTransport, Span, address_of
from fd_kv_tcp.transport import ADDRESS_VARIABLE
from fd_scale_out.receiver_driven import WireError

from fastdeploy_core.contracts.kv_transport import TransportCapabilities, TransportOptions
from fastdeploy_core.errors import CapabilityError, ResourceError

PROTOCOL_VARIABLE: Final = "FD_KV_MOONCAKE_PROTOCOL"
INSTALL: Final = "pip install mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda"
MAX_LOST: Final = 64  # reads that failed: what they may still write to is kept


class MooncakeTransport(LibraryTransport):
    """See contracts.kv_transport.KVTransport. Thread-safe."""

    name = "mooncake"
    contract = (1, 0)
    capabilities = TransportCapabilities(
        read=True, receiver_driven=True, fenced=True, same_host_only=False, max_regions=16
    )

    max_spans = 256  # a call with 4096 of them fails, and so do all that follow

    def open_library(self, options: TransportOptions) -> Library:
        """CapabilityError where Mooncake cannot be imported or started."""
        # A call that waits for a lost peer cannot be ended. By default it takes 30 s.
        limit_s = str(max(1, math.ceil(options.progress_timeout_s)))
        for variable in ("MC_TRANSFER_TIMEOUT", "MC_TCP_STATUS_TIMEOUT_SEC"):
            os.environ.setdefault(variable, limit_s)
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise CapabilityError(
                f"kv transport mooncake needs Mooncake ({INSTALL}): {error}"
            ) from None
        address = options.address or os.environ.get(ADDRESS_VARIABLE, "")
        return _Mooncake(TransferEngine(), address.partition(":")[0] or "127.0.0.1")


class _Mooncake:
    """A Library: one engine, which serves and reads."""

    def __init__(self, engine: Any, host: str) -> None:
        protocol = os.environ.get(PROTOCOL_VARIABLE, "") or "tcp"
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if code:
            raise CapabilityError(
                f"kv transport mooncake: initialize({host!r}, {protocol!r}) gave {code}; "
                f"{PROTOCOL_VARIABLE} is tcp or rdma"
            )
        self.engine: Any = engine
        self._session = f"{host}:{engine.get_rpc_port()}"
        self.num_lost = 0
        self._lock = threading.Lock()

    def register(self, address: int, num_bytes: int) -> None:
        code = self.engine.register_memory(address, num_bytes)
        if code:
            raise ResourceError(f"Mooncake cannot register {num_bytes} bytes: {code}")

    def shown(self) -> bytes:
        return self._session.encode()

    def reader(self, shown: bytes, landing: memoryview) -> _MooncakeReader:
        if self.num_lost >= MAX_LOST:
            raise WireError(f"{MAX_LOST} reads have failed; the transport must be opened anew")
        with self._lock:
            self.register(address_of(landing), len(landing))
        return _MooncakeReader(self, shown.decode("utf-8", "replace"), landing)

    def close(self) -> None:
        self.engine = None  # its destructor ends connections and threads


class _MooncakeReader:
    """A Reader."""

    def __init__(self, library: _Mooncake, session: str, landing: memoryview) -> None:
        self._library, self._session, self._landing = library, session, landing
        self._is_lost = False

    def read(self, spans: Sequence[Span], landing: int, look: Callable[[], None]) -> None:
        sources, sizes = map(list, zip(*spans, strict=True))
        targets = list(itertools.accumulate(sizes[:-1], initial=landing))
        look()
        self._is_lost = True
        code = self._library.engine.batch_transfer_sync_read(self._session, targets, sources, sizes)
        if code:
            raise WireError(f"Mooncake: the read ended with code {code}")
        self._is_lost = False

    def close(self) -> bool:
        if self._is_lost:
            self._library.num_lost += 1
        else:
            self._library.engine.unregister_memory(address_of(self._landing))
        return not self._is_lost
