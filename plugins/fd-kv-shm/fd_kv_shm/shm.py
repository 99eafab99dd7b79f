"""KV blocks between processes of one host through shared memory; driver `shm`.

A source copies requested blocks into a sealed staging area, the destination copies them out. One
thread per transport does all of it; see link.py for sockets and wire.py for messages.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fd_scale_out.receiver_driven import (
    Descriptor,
    ReceiverDrivenTransport,
    RegionInfo,
    Transfer,
)

from fastdeploy_core.contracts.kv_transport import TransportCapabilities, TransportOptions
from fastdeploy_core.devices.host_communicator import check_private
from fastdeploy_core.errors import CapabilityError

from . import wire
from .pump import Pump


class SharedMemoryTransport(ReceiverDrivenTransport):
    """See contracts.kv_transport.KVTransport. Thread-safe."""

    name = "shm"
    contract = (1, 0)
    capabilities = TransportCapabilities(
        read=True, receiver_driven=True, fenced=True, same_host_only=True
    )
    protocol = wire.PROTOCOL

    def __init__(self, options: TransportOptions) -> None:
        if not hasattr(os, "memfd_create"):
            raise CapabilityError(
                "kv transport 'shm' needs sealed shared memory (memfd_create), which this "
                "operating system lacks; choose another with: fastdeploy plugins list"
            )
        super().__init__(options)

    def _listen(self) -> str:
        given = self.options.folder
        self._made_folder = "" if given else tempfile.mkdtemp(prefix="fastdeploy-kv-")
        folder = Path(given or self._made_folder)
        try:
            check_private(folder, "open the transport")
            self._path = folder.absolute() / f"kv-{self.epoch:016x}.sock"
            self._pump = Pump(self, str(self._path))
        except BaseException:
            self._remove_folder()
            raise
        return str(self._path)

    def _connect(self, there: Descriptor) -> None:
        self._pump.connect(there)

    def _known_regions(self, peer: str) -> Mapping[int, RegionInfo]:
        return self._pump.remote_regions(peer)

    def _begin(self, transfer: Transfer) -> None:
        self._pump.start(transfer)

    def _end(self, transfer: Transfer) -> None:
        self._pump.forget(transfer)

    def _disconnect(self, peer: str) -> None:
        self._pump.disconnect(peer, "fenced")

    def _note(self, peer: str, data: bytes) -> bool:
        return self._pump.note(peer, data)

    def _shut_down(self) -> None:
        self._pump.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._made_folder:
            with contextlib.suppress(OSError):
                Path(self._made_folder).rmdir()
