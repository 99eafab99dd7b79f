"""One connection: who is there, frames, and the messages in them.

Both sides prove that they know the secret before anything else is read: greeting and proofs have
fixed sizes and nothing in them is parsed. The proof covers two fresh nonces, and so do the keys of
the connection. Every frame then carries a code over its place in the stream and its content: one
that was changed, repeated, left out or taken from another connection ends the connection unread.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from fd_scale_out.receiver_driven import DECODE_ERRORS, Message, WireError, encode

PROTOCOL: Final = 4
GREETING: Final = b"FastDeploy KV 1\n"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
CODE_BYTES: Final = 16
CODE_NONCE_BYTES: Final = 12
MAX_MESSAGE_BYTES: Final = 1 << 20
MESSAGE, DATA = 0, 1  # kinds of frames
_HEAD: Final = struct.Struct("!BQ")  # kind, bytes of the content
_TIME: Final = struct.Struct("@ll")  # timeval: seconds, microseconds
_MAX_PARTS: Final = 512  # of one call
_LOOKS_PER_TIMEOUT: Final = 4  # what has come is noticed with each


class Hello(Message):
    """Client: who it is, and whom it expects."""

    protocol: int
    major: int
    epoch: int
    expected_epoch: int
    model_revision: str
    layouts: dict[int, tuple[int, str]]  # by region: bytes of a block, layout hash


class Welcome(Message):
    """Server: both fit together."""


class Refused(Message):
    """Server: they do not, or what was asked for cannot be."""

    reason: str


class Read(Message):
    """Client: the content of these blocks, each in all of the regions. A DATA frame answers."""

    region_ids: list[int]
    blocks: list[int]


class Note(Message):
    """Client: a control message of the core's. A Pong answers."""

    data: bytes


class Look(Message):
    """Client: how does a library read from here? It is about to; see library.py. Shown answers."""


class Shown(Message):
    """Server: by region where it begins, and what the library needs to know of this side."""

    addresses: dict[int, int]
    data: bytes


class Ping(Message):
    """Client: still there?"""


class Pong(Message):
    """Server: yes."""


AnyMessage = Hello | Welcome | Refused | Read | Note | Look | Shown | Ping | Pong
_decoder = msgspec.msgpack.Decoder(AnyMessage)


@dataclass(slots=True)
class Progress:
    """Of the connections to one peer, which share a network: while bytes come on one of them, the
    others wait."""

    moved_s: float = field(default_factory=time.monotonic)  # when bytes came last, or it began


class Channel:
    """An authenticated connection. The constructor shakes hands, within the socket's timeout."""

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        *,
        is_client: bool,
        progress: Progress | None = None,
    ) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._progress = sock, progress or Progress()
        # One call for a frame, not one for each part that has come; TLS has no such calls.
        self._is_plain = not isinstance(sock, ssl.SSLSocket)
        self._timeout_s: float | None = None
        self.set_timeout(sock.gettimeout())
        nonce = secrets.token_bytes(NONCE_BYTES)
        if is_client:
            sock.sendall(GREETING + nonce)
            transcript = GREETING + nonce + self._take(NONCE_BYTES)
            sock.sendall(_derive(secret, b"client", transcript))
            is_known = hmac.compare_digest(
                self._take(PROOF_BYTES), _derive(secret, b"server", transcript)
            )
        else:
            greeting = self._take(len(GREETING) + NONCE_BYTES)
            if not greeting.startswith(GREETING):
                raise WireError("no greeting of this protocol")
            sock.sendall(nonce)
            transcript = greeting + nonce
            is_known = hmac.compare_digest(
                self._take(PROOF_BYTES), _derive(secret, b"client", transcript)
            )
        if not is_known:
            raise WireError("authentication failed: the secrets differ")
        if not is_client:
            sock.sendall(_derive(secret, b"server", transcript))
        keys = [_derive(secret, way, transcript) for way in (b"to server", b"to client")]
        self._out_key, self._in_key = keys if is_client else keys[::-1]
        self._num_out = self._num_in = 0
        self._head = self._wanted = b""  # of the frame that is being received, and its code

    def fileno(self) -> int:
        """For select."""
        return self._sock.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """One message."""
        self._send(MESSAGE, [memoryview(encode(message))])

    def send_data(self, parts: Sequence[memoryview]) -> None:
        """Bytes of blocks, as one frame."""
        self._send(DATA, parts)

    def receive(self) -> AnyMessage:
        """One message; WireError for whatever else comes."""
        view = memoryview(bytearray(self._take_head(MESSAGE, MAX_MESSAGE_BYTES)))
        self._take_checked(view)
        try:
            message: AnyMessage = _decoder.decode(view)
            return message
        except DECODE_ERRORS as error:
            raise WireError(f"malformed message: {error}") from None

    def receive_data(self, content: memoryview) -> None:
        """Fill `content` with a frame of exactly its size."""
        size = self._take_head(DATA, content.nbytes)
        if size != content.nbytes:
            raise WireError(f"{size} bytes came where {content.nbytes} were due")
        self._take_checked(content)

    def ask(self, message: msgspec.Struct) -> Welcome | Pong | Shown:
        """Send a message, and return the answer; WireError with the peer's words if it refuses."""
        self.send(message)
        answer = self.receive()
        if isinstance(answer, Refused):
            raise WireError(answer.reason[:300])
        if not isinstance(answer, Welcome | Pong | Shown):
            raise WireError(f"unexpected {type(answer).__name__}")
        return answer

    def set_timeout(self, seconds: float | None) -> None:
        """What a call waits for the peer at most."""
        self._timeout_s = seconds
        if not self._is_plain:
            self._sock.settimeout(seconds)
            return
        self._sock.settimeout(None)
        for option, looks in ((socket.SO_SNDTIMEO, 1), (socket.SO_RCVTIMEO, _LOOKS_PER_TIMEOUT)):
            time_s = divmod(int((seconds or 0.0) * 1e6 / looks), 1_000_000)
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(*time_s))

    def close(self) -> None:
        """End the connection; a thread that waits for the peer hears of it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _send(self, kind: int, parts: Sequence[memoryview]) -> None:
        head = _HEAD.pack(kind, sum(part.nbytes for part in parts))
        code = _code(self._out_key, self._num_out, [head, *parts])
        self._num_out += 1
        left = [memoryview(head + code), *parts]
        if not self._is_plain and parts[0].nbytes < 65536:  # fewer calls for small blocks
            left = [memoryview(b"".join(left))]
        try:
            while left and self._is_plain:
                left = _rest(left, self._sock.sendmsg(left[:_MAX_PARTS]))
            for part in left:
                self._sock.sendall(part)
        except BlockingIOError as error:
            raise TimeoutError from error

    def _take_head(self, kind: int, limit: int) -> int:
        """Bytes of the content. Its code comes before it."""
        taken = self._take(_HEAD.size + CODE_BYTES)
        self._head, self._wanted = taken[: _HEAD.size], taken[_HEAD.size :]
        found, size = _HEAD.unpack(self._head)
        if found != kind or size > limit:
            raise WireError(f"frame of kind {found} with {size} bytes; due was {kind}, to {limit}")
        return int(size)

    def _take_checked(self, content: memoryview) -> None:
        self._take_into(content)
        code = _code(self._in_key, self._num_in, [self._head, content])
        self._num_in += 1
        if not hmac.compare_digest(code, self._wanted):
            raise WireError("a frame was changed on its way")

    def _take(self, size: int) -> bytes:
        content = bytearray(size)
        self._take_into(memoryview(content))
        return bytes(content)

    def _take_into(self, content: memoryview) -> None:
        at = 0
        while at < content.nbytes:
            try:
                flags = socket.MSG_WAITALL if self._is_plain else 0
                count = self._sock.recv_into(content[at:], 0, flags)
            except (TimeoutError, BlockingIOError) as error:
                if time.monotonic() - self._progress.moved_s >= (self._timeout_s or 0.0):
                    raise TimeoutError from error
                continue
            if not count:
                raise WireError("the peer has gone")
            self._progress.moved_s = time.monotonic()
            at += count


def _derive(secret: bytes, purpose: bytes, transcript: bytes) -> bytes:
    return hmac.new(
        secret, b"fastdeploy-kv-tcp\0" + purpose + b"\0" + transcript, "sha256"
    ).digest()


def _rest(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of parts when so many bytes were sent."""
    for number, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[number + 1 :]]
        count -= part.nbytes
    return []


def _code(key: bytes, number: int, parts: Sequence[bytes | memoryview]) -> bytes:
    """Of a frame: GMAC (NIST SP 800-38D), which processors compute several times as fast as a hash
    or Poly1305. A nonce must be used once: it is the frame's place in the stream."""
    coder = Cipher(AES(key), GCM(number.to_bytes(CODE_NONCE_BYTES, "big"))).encryptor()
    for part in parts:
        coder.authenticate_additional_data(part)
    coder.finalize()
    return coder.tag
