"""What two instances say to each other about a prompt that one computes for the other: notes of the
KV transport, which has authenticated both."""

from __future__ import annotations

from typing import Final

import msgspec

from fastdeploy_core.types import SequenceDelta

MAX_BLOCKS: Final = 256  # of one Have; two numbers of at most five bytes each


class _Note(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all. `name`: of the handover. A note of an older attempt is void."""

    name: str
    attempt: int


class Hello(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """Decode instance, before each Want: how it is reached."""

    descriptor: bytes


class Want(_Note):
    """Decode instance: the prompt's blocks from number `first` on, as Parts numbers them. last_key:
    of its last full block, which covers all tokens before it, the salt and the model."""

    first: int
    total: int
    last_key: bytes


class Have(_Note):
    """Prefill instance: these blocks, of numbers `first` and up, all of one group of layers, lie in
    its host tier of that group and stay."""

    first: int
    blocks: list[int]
    checksums: list[int]  # CRC-32 of all ranks' bytes


class First(_Note):
    """Prefill instance: the prompt is computed, and this is the answer's first token, which needs
    none of the blocks. num_cached_tokens: of the prompt, those that were not computed there."""

    token: SequenceDelta
    num_cached_tokens: int | None


class Commit(_Note):
    """Prefill instance: there are no more than `total` blocks."""

    total: int


class Accept(_Note):
    """Decode instance: all has come that is of use there. Nothing is needed any more."""


class Abort(_Note):
    """Either: it is not wanted, or not to be had."""

    reason: str


class Aborted(_Note):
    """The answer to Abort: nothing of it is read or written any more."""


class Alive(_Note):
    """Either, again and again: still there, and the handover is not forgotten."""


Note = Hello | Want | Have | First | Commit | Accept | Abort | Aborted | Alive
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Note)


def encode(note: msgspec.Struct) -> bytes:
    """A note as MessagePack."""
    return _encoder.encode(note)


def decode(data: bytes) -> Note:
    """One note; DECODE_ERRORS if it is none."""
    note: Note = _decoder.decode(data)
    return note
