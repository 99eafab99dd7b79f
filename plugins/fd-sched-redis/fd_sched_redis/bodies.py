"""Requests as bytes in Redis, sealed: what was changed there, or is another's, is not run."""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from fastdeploy_core.types import Request

from .options import Options

SEAL_BYTES = 16


class Bodies:
    """Thread-safe. With a key file the seal proves who wrote a request, else that it is whole."""

    def __init__(self, options: Options) -> None:
        self._blank = hashlib.blake2b(
            key=options.secret, digest_size=SEAL_BYTES, person=b"fd-sched-redis"
        )
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Request).decode

    def seal(self, request: Request) -> bytes:
        """What is put into Redis."""
        body = self._encode(request)
        return self._seal(body) + body

    def open(self, request_id: str, sealed: bytes) -> Request:
        """The request of this id. ValueError: it is not what was sealed."""
        seal, body = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(body)):
            raise ValueError("it is not as its front end wrote it")
        request = self._decode(body)
        if request.request_id != request_id:
            raise ValueError("it is another request")
        return request

    def _seal(self, body: bytes) -> bytes:
        seal = self._blank.copy()
        seal.update(body)
        return seal.digest()
