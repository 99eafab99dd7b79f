"""One socket between two shared-memory transports: framing, handshake, shared memory.

The client side pulls. It maps the memory of regions that the server can show, read-only; blocks of
others are copied by the server side into the staging area, which the client maps read-only, too.
Runs only in the transport's thread; transfers are the business of shm.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec
from fd_scale_out.receiver_driven import (
    ReceiverDrivenTransport,
    RegionInfo,
    WireError,
    encode,
    peer_name,
)

from fastdeploy_core.contracts.base import CONTRACT

from . import wire

STAGING_BYTES: Final = 8 * 1024 * 1024  # per link, unless two blocks need more
MAX_ACTIVE_TRANSFERS: Final = 16  # per link; the others wait for their turn
MAX_OUT_BYTES: Final = 4 * 1024 * 1024  # a peer that does not read is cut off
MAX_QUEUED_BLOCKS: Final = MAX_ACTIVE_TRANSFERS * wire.MAX_READ_BLOCKS
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(slots=True, eq=False)
class Link:
    """State of one connection. `peer` is known (and trusted) once `is_open`."""

    sock: socket.socket
    role: Literal["client", "server"]
    own: ReceiverDrivenTransport
    peer: str = ""
    peer_epoch: int = 0
    is_open: bool = False
    closed_reason: str = ""
    deadline: float = 0.0
    staging: mmap.mmap | None = None
    slot_bytes: int = 0
    num_slots: int = 0
    shown: dict[int, memoryview] = field(default_factory=dict)  # client: regions it has mapped
    shows: frozenset[int] = frozenset()  # server: regions whose memory the client may map
    free_slots: deque[int] = field(default_factory=deque)  # server: slots it may fill
    queue: deque[tuple[int, int, int, int]] = field(default_factory=deque)
    outgoing: bytearray = field(default_factory=bytearray)
    _incoming: bytearray = field(default_factory=bytearray)
    _fds: list[int] = field(default_factory=list)
    _hello: bytes = b""
    _challenge: bytes = b""
    _refusal: str = ""

    def __post_init__(self) -> None:
        self.sock.setblocking(False)
        self.deadline = time.monotonic() + self.own.handshake_s
        if self.role == "client":
            hello = wire.Hello(
                protocol=wire.PROTOCOL,
                contract=CONTRACT,
                epoch=self.own.epoch,
                nonce=secrets.token_bytes(wire.NONCE_BYTES),
                model_revision=self.own.options.model_revision,
                expected_epoch=self.peer_epoch,
                layouts=self.own.layouts(),
            )
            self._hello = encode(hello)
            self._send_payload(self._hello)

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; flush() writes it."""
        self._send_payload(encode(message))

    def flush(self) -> None:
        """Write what the socket takes now."""
        if not self.outgoing:
            return
        try:
            sent = self.sock.send(self.outgoing)
        except (BlockingIOError, InterruptedError):
            return
        del self.outgoing[:sent]

    def receive(self) -> list[wire.AnyMessage]:
        """Read what is there; handshake messages are dealt with here, the others returned."""
        limit = wire.MAX_FRAME_BYTES if self.is_open else wire.MAX_HANDSHAKE_BYTES
        try:
            if self.is_open or self.role == "server":  # clients send no descriptors
                data = self.sock.recv(262144)
            else:
                data, fds, _, _ = socket.recv_fds(self.sock, 65536, 1 + wire.MAX_SHOWN)
                self._fds.extend(fds)
                if len(self._fds) > 1 + wire.MAX_SHOWN:
                    raise WireError("more descriptors came than can be")
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise WireError("the peer has gone")
        self._incoming += data
        messages: list[wire.AnyMessage] = []
        while (payload := wire.take_frame(self._incoming, limit)) is not None:
            message = wire.decode(payload)
            if isinstance(message, wire.Bye):
                raise WireError(message.reason[:200])
            if self.is_open:
                messages.append(message)
            else:
                self._handshake(message, payload)
        return messages

    def slot(self, index: int, num_bytes: int) -> memoryview:
        """The bytes of one slot."""
        if self.staging is None or not 0 <= index < self.num_slots or num_bytes > self.slot_bytes:
            raise WireError(f"slot {index} with {num_bytes} bytes does not exist")
        start = index * self.slot_bytes
        return memoryview(self.staging)[start : start + num_bytes]

    def close(self, reason: str) -> None:
        """End the connection, telling the peer why if it can still be told."""
        if self.closed_reason:
            return
        self.closed_reason = reason
        with contextlib.suppress(OSError):
            self.outgoing += wire.frame(encode(wire.Bye(reason)))
            self.sock.send(self.outgoing)
        self.sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self.shown.clear()  # unmapped with the last view
        if self.staging is not None:
            with contextlib.suppress(BufferError):  # a view in use; freed with its last reference
                self.staging.close()
            self.staging = None

    def _send_payload(self, payload: bytes) -> None:
        self.outgoing += wire.frame(payload)
        if len(self.outgoing) > MAX_OUT_BYTES:
            raise WireError("the peer does not read what it is sent")

    def _handshake(self, message: wire.AnyMessage, payload: bytes) -> None:
        if self.role == "server":
            if isinstance(message, wire.Hello) and not self._hello:
                self._on_hello(message, payload)
                return
            if isinstance(message, wire.Proof) and self._challenge:
                self._on_proof(message)
                return
        elif isinstance(message, wire.Challenge) and not self._challenge:
            self._challenge = payload
            if message.epoch != self.peer_epoch:
                raise WireError("the peer has restarted: another epoch answers")
            self.send(wire.Proof(wire.proof(self.own.options.secret, b"client", self._transcript)))
            return
        elif isinstance(message, wire.Welcome) and self._challenge:
            self._on_welcome(message)
            return
        raise WireError(f"unexpected {type(message).__name__} in the handshake")

    @property
    def _transcript(self) -> bytes:
        return wire.frame(self._hello) + wire.frame(self._challenge)

    def _on_hello(self, hello: wire.Hello, payload: bytes) -> None:
        if hello.protocol != wire.PROTOCOL or hello.contract[0] != CONTRACT[0]:
            raise WireError(f"protocol {hello.protocol}, contract {hello.contract} not spoken here")
        if len(hello.nonce) != wire.NONCE_BYTES:
            raise WireError("wrong nonce")
        if hello.expected_epoch != self.own.epoch:
            raise WireError("the peer has restarted: another epoch answers")
        self._hello = payload
        # Told apart only after the proof, so that unknown processes learn nothing about the model.
        self._refusal = self.own.terms_refusal(hello.model_revision, hello.layouts)
        self.peer_epoch = hello.epoch
        self._challenge = encode(
            wire.Challenge(self.own.epoch, secrets.token_bytes(wire.NONCE_BYTES))
        )
        self._send_payload(self._challenge)

    def _on_proof(self, message: wire.Proof) -> None:
        if not wire.proves(message.mac, self.own.options.secret, b"client", self._transcript):
            raise WireError("authentication failed: the secrets differ")
        if self._refusal:
            raise WireError(self._refusal)
        largest = max((size for size, _ in self.own.layouts().values()), default=1)
        self.slot_bytes = -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE
        self.num_slots = max(2, min(64, STAGING_BYTES // self.slot_bytes))
        self.free_slots.extend(range(self.num_slots))
        fd = os.memfd_create("fastdeploy-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = self.slot_bytes * self.num_slots
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self.staging = mmap.mmap(fd, size)
            mac = wire.proof(self.own.options.secret, b"server", self._transcript)
            regions = [r for r, _ in self.own.regions.values() if r.file >= 0][: wire.MAX_SHOWN]
            shown = [
                RegionInfo(r.region_id, r.num_blocks, r.block_bytes, r.layout_hash) for r in regions
            ]
            payload = encode(wire.Welcome(mac, self.slot_bytes, self.num_slots, shown))
            data, fds = wire.frame(payload), [fd, *(region.file for region in regions)]
            self.shows = frozenset(region.region_id for region in regions)
            if self.outgoing or socket.send_fds(self.sock, [data], fds) != len(data):
                raise WireError("the peer does not read what it is sent")
        finally:
            os.close(fd)
        self._opened()

    def _on_welcome(self, message: wire.Welcome) -> None:
        if not wire.proves(message.mac, self.own.options.secret, b"server", self._transcript):
            raise WireError("authentication failed: the secrets differ")
        if len(self._fds) != 1 + len(message.shown):
            raise WireError("not all memory came that the welcome speaks of")
        self.staging = self._map(message.slot_bytes * message.num_slots)
        for region in message.shown:
            size = region.num_blocks * region.block_bytes
            memory = self._map(size)
            self.shown[region.region_id] = memoryview(memory)[:size]
        self.slot_bytes, self.num_slots = message.slot_bytes, message.num_slots
        self._opened()

    def _map(self, size: int) -> mmap.mmap:
        """Memory whose descriptor came next."""
        fd = self._fds.pop(0)
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            # Memory that its maker could shrink would kill this process when it is read.
            if sealed & _SEALS != _SEALS or os.fstat(fd).st_size < size or size <= 0:
                raise WireError("the memory is not what the welcome says")
            return mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise WireError(f"the memory cannot be mapped: {error}") from None
        finally:
            os.close(fd)

    def _opened(self) -> None:
        self.is_open = True
        self.peer = peer_name(self.own.name, self.peer_epoch)


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end of a unix socket."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", data)[1])


@contextlib.contextmanager
def short_path(address: str) -> Iterator[str]:
    """A unix socket's path may have about 100 bytes; a longer one goes through its folder's
    descriptor."""
    if len(os.fsencode(address)) < 100:
        yield address
        return
    folder, _, name = address.rpartition("/")
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
