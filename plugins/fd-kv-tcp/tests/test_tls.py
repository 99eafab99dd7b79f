"""With TLS nobody who listens learns what passes, and nobody without a certificate gets through."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fd_kv_tcp.tls import FOLDER_VARIABLE
from fd_kv_tcp.transport import TcpTransport
from test_strangers import BLOCK, SECRET, open_transport, proxy, pull, where

from fastdeploy_core.contracts.kv_transport import TransportOptions
from fastdeploy_core.errors import CapabilityError, ConfigError
from fastdeploy_testing.conformance.test_kv_transport_faults import KVTransportFaultsConformance


def make_folder(folder: Path) -> str:
    """An authority of its own, and a certificate that it signed."""
    folder.mkdir()
    now = datetime.datetime.now(datetime.UTC)
    names = {
        one: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one)])
        for one in ("authority", "instance")
    }
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def certificate(of: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(names["authority" if is_authority else "instance"])
            .issuer_name(names["authority"])
            .public_key(of.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        made = builder.sign(authority, hashes.SHA256())
        return made.public_bytes(serialization.Encoding.PEM)

    (folder / "ca.pem").write_bytes(certificate(authority, is_authority=True))
    (folder / "cert.pem").write_bytes(certificate(key, is_authority=False))
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    made = make_folder(tmp_path / "one")
    monkeypatch.setenv(FOLDER_VARIABLE, made)
    return made


class TestTlsFaults(KVTransportFaultsConformance):
    """The kit's faults with TLS under all connections."""

    driver_name = "tcp"

    @pytest.fixture(autouse=True)
    def _tls(self, folder: str) -> None:
        """Both sides."""


def _heard(source: TcpTransport) -> tuple[bytes, bool]:
    """What somebody between both sides hears of a pull, and whether it succeeds."""
    heard: list[bytes] = []
    keep: Callable[[bytes, int], bytes] = lambda data, _: (heard.append(data), data)[1]  # noqa: E731
    descriptor, stop = proxy(source, keep)
    good = pull(descriptor)
    stop()
    return b"".join(heard), good


def test_who_listens_learns_nothing(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pull without TLS shows the blocks, so the listener does hear them."""
    source, _ = open_transport(7)
    try:
        assert source.capabilities.encrypted
        heard, good = _heard(source)
        assert (
            good and len(heard) > 2 * BLOCK and b"\7" * 16 not in heard and b"layout" not in heard
        )
    finally:
        source.close()
    monkeypatch.delenv(FOLDER_VARIABLE)
    source, _ = open_transport(7)
    try:
        assert not source.capabilities.encrypted
        heard, good = _heard(source)
        assert good and b"\7" * BLOCK in heard and b"layout" in heard
    finally:
        source.close()


def test_a_certificate_of_another_authority_does_not_get_in(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However well it knows the secret."""
    source, _ = open_transport(7)
    try:
        other = make_folder(tmp_path / "other")
        monkeypatch.setenv(FOLDER_VARIABLE, other)
        assert not pull(source.descriptor())
        monkeypatch.setenv(FOLDER_VARIABLE, folder)
        assert not pull(source.descriptor(), secret=b"x" * 32)
        assert pull(source.descriptor())
        with pytest.raises(ssl.SSLError):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with socket.create_connection(where(source)) as sock, context.wrap_socket(sock) as own:
                own.sendall(b"FastDeploy KV 1\n" + b"n" * 32)
                while own.recv(4096):
                    raise AssertionError("somebody without a certificate got an answer")
    finally:
        source.close()


def test_with_and_without_tls_do_not_talk(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = open_transport(7)
    monkeypatch.delenv(FOLDER_VARIABLE)
    plain, _ = open_transport(7)
    try:
        with pytest.raises(CapabilityError, match="protocol"):
            plain.connect(source.descriptor())
        with pytest.raises(CapabilityError, match="protocol"):
            source.connect(plain.descriptor())
    finally:
        source.close()
        plain.close()


@pytest.mark.parametrize("missing", ["ca.pem", "cert.pem", "key.pem"])
def test_a_folder_without_all_files_is_refused(folder: str, missing: str) -> None:
    Path(folder, missing).unlink()
    with pytest.raises(ConfigError, match=FOLDER_VARIABLE):
        TcpTransport(TransportOptions(secret=SECRET))
