"""Who may hand blocks to whom: the secret that instances share, and tickets, which are how one is
reached, signed with it. A ticket is no secret: to use it takes the secret."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import zlib
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from fastdeploy_core import envs
from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.types import InstanceRole
from fd_scale_out.receiver_driven import DECODE_ERRORS

from .splitting import Layout

SECRET_VARIABLE: Final = "FD_KV_SECRET"  # noqa: S105, its name
MIN_SECRET_CHARS: Final = 32
MAX_TICKET_BYTES: Final = 16 * 1024
MAX_CONTENT_BYTES: Final = 1 << 20
_MAC_BYTES: Final = 32
_NAME: Final = re.compile(r"[0-9a-f]{32}")


def shared_secret() -> bytes:
    """The secret of FD_KV_SECRET, or of a file that instances of this user find; ConfigError."""
    given = str(envs.read(SECRET_VARIABLE))
    if given:
        if len(given) < MIN_SECRET_CHARS:
            raise ConfigError(
                f"{SECRET_VARIABLE} has {len(given)} characters; at least {MIN_SECRET_CHARS} are "
                "needed, for example those of: openssl rand -hex 32"
            )
        return given.encode("utf-8", "surrogateescape")
    path = Path(str(envs.read("FD_CACHE_DIR"))).expanduser() / "kv-secret"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            new = path.with_name(f"kv-secret.{secrets.token_hex(8)}")
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_hex(32).encode())
            try:
                os.link(new, path)  # the first of several wins, and is whole
            except FileExistsError:
                pass
            finally:
                new.unlink()
        found = path.stat()
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"no secret for handing KV blocks over: {path}: {error.strerror}; set {SECRET_VARIABLE}"
        ) from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"{path} must hold at least {MIN_SECRET_CHARS} bytes and be readable by its owner "
            f"alone; run: rm {path}, or set {SECRET_VARIABLE}"
        )
    return secret


class Ticket(NamedTuple):
    """How an instance is reached. layout: how its blocks lie, see splitting.py."""

    transport: str
    descriptor: bytes
    layout: Layout


def make_ticket(secret: bytes, ticket: Ticket) -> str:
    """A ticket as text for a header."""
    content = zlib.compress(msgspec.msgpack.encode(ticket))
    return base64.urlsafe_b64encode(content + _mac(secret, content)).decode()


def read_ticket(secret: bytes, transport: str, text: str) -> Ticket:
    """A ticket; InvalidRequest for one that nobody with the secret made."""
    try:
        data = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        content, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        is_ours = hmac.compare_digest(mac, _mac(secret, content))
        content = zlib.decompressobj().decompress(content, MAX_CONTENT_BYTES) if is_ours else b""
        ticket = msgspec.msgpack.decode(content, type=Ticket) if is_ours else None
    except (binascii.Error, zlib.error, *DECODE_ERRORS):
        # Not how: a stranger could make it differ each time, and the log takes few kinds.
        raise InvalidRequest("malformed ticket") from None
    if ticket is None:
        raise InvalidRequest(
            "the ticket was signed with another secret; give both instances the same "
            f"{SECRET_VARIABLE}, or run them as the same user"
        )
    if ticket.transport != transport:
        raise InvalidRequest(
            f"the ticket is for --kv-transport {ticket.transport:.40}; this instance has "
            f"{transport}"
        )
    return ticket


class Order(NamedTuple):
    """What a router asks of an instance for one request: the header X-KV-Handover."""

    role: InstanceRole  # prefill: compute the prompt; decode: fetch it from the ticket's owner
    name: str
    ticket: str = ""


def read_order(text: str) -> Order:
    """`prefill NAME` or `decode NAME TICKET`; InvalidRequest for anything else."""
    words = text.split(" ") if len(text) <= MAX_TICKET_BYTES else []
    sizes = {InstanceRole.PREFILL: 2, InstanceRole.DECODE: 3}
    if words and len(words) == sizes.get(words[0]) and _NAME.fullmatch(words[1]):  # type: ignore[call-overload]
        return Order(InstanceRole(words[0]), *words[1:])
    raise InvalidRequest(
        f"X-KV-Handover is {text!r:.80}; possible: prefill NAME, or decode NAME TICKET, where NAME "
        "has 32 hexadecimal digits. A router sets it"
    )


def _mac(secret: bytes, content: bytes) -> bytes:
    return hmac.new(secret, b"fastdeploy-kv-ticket\0" + content, hashlib.sha256).digest()
