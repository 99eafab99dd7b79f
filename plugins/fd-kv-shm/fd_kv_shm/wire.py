"""What the shared-memory transport says on its socket: typed MessagePack in length-prefixed frames.

A frame's length is checked before its bytes are read, its schema before anything is done with it.
Nothing here moves KV bytes; those lie in a shared staging area.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

import msgspec
from fd_scale_out.receiver_driven import DECODE_ERRORS, Message, RegionInfo, WireError

PROTOCOL: Final = 3
NONCE_BYTES: Final = 32
MAX_FRAME_BYTES: Final = 256 * 1024
MAX_HANDSHAKE_BYTES: Final = 64 * 1024
MAX_READ_BLOCKS: Final = 512
MAX_SHOWN: Final = 64  # regions whose memory is shown; of others blocks are staged
_LENGTH: Final = struct.Struct("!I")


class Hello(Message):
    """Client's first words. layouts: region id to (block_bytes, layout_hash)."""

    protocol: int
    contract: tuple[int, int]
    epoch: int
    nonce: bytes
    model_revision: str
    expected_epoch: int  # whom the client believes to speak to
    layouts: dict[int, tuple[int, str]]


class Challenge(Message):
    """Server's answer."""

    epoch: int
    nonce: bytes


class Proof(Message):
    """Client shows that it knows the secret."""

    mac: bytes


class Welcome(Message):
    """Server shows the same; the staging memory's descriptor travels beside it, and then those of
    the shown regions' memory."""

    mac: bytes
    slot_bytes: int
    num_slots: int
    shown: list[RegionInfo]


class Read(Message):
    """Client wants blocks; index of the first within its transfer."""

    serial: int
    region_id: int
    first: int
    blocks: list[int]


class Ready(Message):
    """Blocks lie in the staging area: (index within the transfer, slot) pairs."""

    serial: int
    items: list[tuple[int, int]]


class Here(Message):
    """These blocks may be copied from the memory that was shown, at their own places there; index
    of the first within its transfer."""

    serial: int
    first: int
    count: int


class Free(Message):
    """Client has copied these slots."""

    slots: list[int]


class Drop(Message):
    """Client no longer wants a transfer."""

    serial: int


class Refused(Message):
    """Server will not serve a transfer."""

    serial: int
    reason: str


class Note(Message):
    """A control message of the core's."""

    data: bytes


class Bye(Message):
    """Why the link is about to end; shown in PEER_DOWN."""

    reason: str


AnyMessage = (
    Hello | Challenge | Proof | Welcome | Read | Ready | Here | Free | Drop | Refused | Note | Bye
)
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def frame(payload: bytes) -> bytes:
    """A payload with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


def decode(payload: bytes) -> AnyMessage:
    """One message; WireError if it is not one."""
    try:
        message: AnyMessage = _decoder.decode(payload)
        return message
    except DECODE_ERRORS as error:
        raise WireError(f"malformed message: {error}") from None


def take_frame(buffer: bytearray, limit: int) -> bytes | None:
    """Cut one payload off the front of `buffer`; None until it is complete."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > limit:
        raise WireError(f"frame of {length} bytes; at most {limit} are possible")
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    payload = bytes(buffer[_LENGTH.size : end])
    del buffer[:end]
    return payload


def proof(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    """Proof of knowing `secret`, bound to a role and to every byte both sides said."""
    return hmac.new(
        secret, b"fastdeploy-kv-shm\0" + role + b"\0" + transcript, hashlib.sha256
    ).digest()


def proves(mac: bytes, secret: bytes, role: bytes, transcript: bytes) -> bool:
    """Whether `mac` is that proof; takes the same time for every wrong one."""
    return hmac.compare_digest(mac, proof(secret, role, transcript))
