"""The listening socket, bound before anything slow happens, and its URL."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.errors import ConfigError


def bind_socket(config: ServerConfig) -> socket.socket:
    """The listening socket, bound before anything slow happens; ConfigError if binding fails."""
    address: str | tuple[str, int] = (config.host, config.port)
    where, flags = f"{config.host}:{config.port}", "--host and --port"
    if config.ssl_certfile is not None:
        _check_tls(config.ssl_certfile, config.ssl_keyfile)
    if config.uds is not None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        where, address, flags = config.uds, config.uds, "--uds"
        _remove_stale(Path(config.uds))
    else:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        # asyncio disables Nagle's algorithm only on sockets that declare TCP. With Nagle's
        # algorithm every small answer on a kept-alive connection would wait 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        if config.uds is not None:
            Path(config.uds).chmod(0o600)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise ConfigError(
            f"cannot listen on {where}: {reason}; choose another with {flags}"
        ) from None
    listener.setblocking(False)
    return listener


def _check_tls(certificate: str, key: str | None) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, lambda: "")
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {certificate!r} and --ssl-keyfile {key!r} cannot be used: "
            f"{error.strerror}; expected PEM, a certificate and its own key without a password"
        ) from None


def _remove_stale(path: Path) -> None:
    """Unlink a unix socket that has no listener any more."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """The URL of the server, as far as it is known here."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}"
