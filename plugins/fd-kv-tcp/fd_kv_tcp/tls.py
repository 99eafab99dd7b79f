"""TLS under the connections: what passes is hidden from who listens.

It comes below the proof of the secret (wire.py), and replaces nothing of it: both sides show a
certificate of the deployment's own authority, and then that they know the secret.
"""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import Final

from fastdeploy_core.errors import ConfigError

FOLDER_VARIABLE: Final = "FD_KV_TCP_TLS"
CERTIFICATE, KEY, AUTHORITY = "cert.pem", "key.pem", "ca.pem"


class Tls:
    """Contexts of one instance."""

    def __init__(self, folder: str) -> None:
        """ConfigError unless the folder has a certificate, its key and the authority's."""
        where = Path(folder).expanduser()
        try:
            self._server, self._client = (
                _context(where, kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{FOLDER_VARIABLE}: {where} must hold {CERTIFICATE}, {KEY} and {AUTHORITY}, the "
                f"certificate that signed both sides' ones: {error}"
            ) from error
        self._server.num_tickets = 0  # nobody comes back, and a client must not be told unasked

    def under(self, sock: socket.socket, *, is_client: bool) -> ssl.SSLSocket:
        """The socket with TLS, which shakes hands with do_handshake()."""
        context = self._client if is_client else self._server
        return context.wrap_socket(sock, server_side=not is_client, do_handshake_on_connect=False)


def from_environment() -> Tls | None:
    """As FD_KV_TCP_TLS says; None without it."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    return Tls(folder) if folder else None


def _context(where: Path, kind: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # addresses change; the authority is the deployment's own
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(where / AUTHORITY)
    context.load_cert_chain(where / CERTIFICATE, where / KEY)
    return context
