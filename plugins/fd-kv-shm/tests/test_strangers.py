"""The shared-memory transport against strangers on its socket; the rest is the conformance
kit's."""

from __future__ import annotations

import os
import random
import secrets
import socket
import stat
import time
from pathlib import Path

import pytest
from fd_kv_shm import wire
from fd_kv_shm.shm import SharedMemoryTransport
from fd_scale_out.receiver_driven import descriptor_decoder, encode, peer_name

from fastdeploy_core.contracts.base import CONTRACT
from fastdeploy_core.contracts.kv_transport import (
    Region,
    TransferEventKind,
    TransferPlan,
    TransportOptions,
)
from fastdeploy_core.errors import ConfigError, ResourceError

SECRET = b"s" * 32
BLOCK = 4096


def open_transport(value=0, blocks=8, **options):
    memory = bytearray([value]) * (blocks * BLOCK)
    transport = SharedMemoryTransport(TransportOptions(**{"secret": SECRET} | options))
    transport.register([Region(1, memoryview(memory), BLOCK, "layout")])
    return transport, memory


@pytest.fixture
def source():
    transport, _ = open_transport(7)
    yield transport
    transport.close()


def pull(source, **options):
    """Fetch one block the honest way; True if it arrived."""
    transport, memory = open_transport(0, **options)
    try:
        name = transport.connect(source.descriptor())
        transport.submit(name, TransferPlan(1, 0, [1], [3], [5], 20.0))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for event in transport.poll():
                if event.transfer_id == 1 and event.kind is not TransferEventKind.PROGRESS:
                    done = event.kind is TransferEventKind.DONE
                    return done and memory[5 * BLOCK : 6 * BLOCK] == b"\7" * BLOCK
            time.sleep(0.002)
        return False
    finally:
        transport.close()


def address(transport):
    return descriptor_decoder.decode(transport.descriptor()).address


def talk(transport):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(address(transport))
    return sock


def answer(sock):
    """Everything until the transport hangs up."""
    data = b""
    while True:
        try:
            part = sock.recv(65536)
        except ConnectionError:
            return data
        if not part:
            return data
        data += part


def hello(transport, **changes):
    fields = {
        "protocol": wire.PROTOCOL,
        "contract": CONTRACT,
        "epoch": 5,
        "nonce": b"n" * wire.NONCE_BYTES,
        "model_revision": "",
        "expected_epoch": transport.epoch,
        "layouts": {},
    } | changes
    return wire.Hello(**fields)


def sent(message):
    return wire.frame(encode(message))


def test_socket_lies_in_a_private_folder(source):
    path = Path(address(source))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_folder_that_others_can_read_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        open_transport(folder=str(tmp_path))
    with pytest.raises(ConfigError):
        open_transport(folder=str(tmp_path / "absent"))


def test_given_folder_is_used_and_left(tmp_path):
    tmp_path.chmod(0o700)
    transport, _ = open_transport(folder=str(tmp_path))
    assert Path(address(transport)).parent == tmp_path
    transport.close()
    assert list(tmp_path.iterdir()) == []


def test_long_folder_names_work(tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir(mode=0o700)
    transport, _ = open_transport(7, folder=str(folder))
    assert pull(transport)
    transport.close()


@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 31])
def test_short_secrets_are_refused(secret):
    with pytest.raises(ConfigError, match="32"):
        SharedMemoryTransport(TransportOptions(secret=secret))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x00\x10\x00\x00" + b"x" * 100,
        b"\x00\x00\x00\x05\x80\x04N.x",
        b"\x00\x00\x00\x04\xdd\xff\xff\xff",
        sent(wire.Proof(b"x" * 32)),
        sent(wire.Read(1, 1, 0, [0])),
        sent(wire.Note(b"x")),
    ],
)
def test_strangers_words_end_the_connection_and_harm_nobody(source, data):
    with talk(source) as sock:
        sock.sendall(data)
        if data.startswith(b"\x00\x10\x00"):
            sock.shutdown(socket.SHUT_WR)  # an unfinished frame
        assert b"\7" * 64 not in answer(sock)
    assert pull(source)


def test_random_bytes_harm_nobody(source):
    rng = random.Random(0)
    for _ in range(30):
        with talk(source) as sock:
            sock.sendall(rng.randbytes(rng.randrange(1, 5000)))
            sock.shutdown(socket.SHUT_WR)
            assert b"\7" * 64 not in answer(sock)
    assert pull(source)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expected_epoch": 1}, b"another epoch"),
        ({"contract": (99, 0)}, b"not spoken"),
        ({"protocol": 99}, b"not spoken"),
        ({"nonce": b"short"}, b"nonce"),
    ],
)
def test_wrong_greetings_are_turned_away(source, changes, words):
    with talk(source) as sock:
        sock.sendall(sent(hello(source, **changes)))
        assert words in answer(sock)


def test_guessing_the_proof_gets_no_memory(source):
    with talk(source) as sock:
        sock.sendall(sent(hello(source)))
        sock.sendall(sent(wire.Proof(secrets.token_bytes(32))))
        data = answer(sock)
    assert b"authentication failed" in data and b"\7" * 64 not in data


def test_recorded_handshake_cannot_be_replayed(source):
    """The server's nonce is new each time, so yesterday's proof proves nothing."""
    greeting = encode(hello(source))
    with talk(source) as sock:
        sock.sendall(wire.frame(greeting))
        buffer = bytearray()
        while (challenge := wire.take_frame(buffer, 65536)) is None:
            buffer += sock.recv(65536)
        transcript = wire.frame(greeting) + wire.frame(challenge)
        mac = wire.proof(SECRET, b"client", transcript)
        sock.sendall(sent(wire.Proof(mac)))
        assert sock.recv(65536), "the honest proof is welcome"
    with talk(source) as sock:
        sock.sendall(wire.frame(greeting) + sent(wire.Proof(mac)))
        assert b"authentication failed" in answer(sock)
    assert not wire.proves(mac, SECRET, b"server", transcript), "one role's proof is the other's"


def opened(source):
    """An authenticated socket that then misbehaves."""
    sock = talk(source)
    greeting = encode(hello(source))
    sock.sendall(wire.frame(greeting))
    buffer = bytearray()
    while (challenge := wire.take_frame(buffer, 65536)) is None:
        buffer += sock.recv(65536)
    transcript = wire.frame(greeting) + wire.frame(challenge)
    sock.sendall(sent(wire.Proof(wire.proof(SECRET, b"client", transcript))))
    data, fds, _, _ = socket.recv_fds(sock, 65536, 1)
    for fd in fds:
        os.close(fd)
    assert isinstance(wire.decode(data[4:]), wire.Welcome) and len(fds) == 1
    return sock


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (wire.Read(1, 1, 0, [8]), b"out of range"),
        (wire.Read(1, 1, 0, [-1]), b"out of range"),
        (wire.Read(1, 99, 0, [0]), b"no region"),
        (wire.Read(1, 1, 0, []), b"no blocks"),
        (wire.Free([0]), b"not in use"),
        (wire.Free([9999]), b"not in use"),
        (wire.Ready(1, [(0, 0)]), b"unexpected"),
        (wire.Note(b"x" * 5000), b"note of 5000"),
    ],
)
def test_authenticated_peer_is_still_checked(source, message, words):
    with opened(source) as sock:
        sock.sendall(sent(message))
        data = b""
        while words not in data:
            part = sock.recv(65536)
            assert part, f"hung up without a word about it: {data!r}"
            data += part
    assert pull(source)


def test_peer_that_never_reads_is_cut_off(source):
    with opened(source) as sock:
        sock.setblocking(False)
        request = sent(wire.Read(1, 99, 0, [0]))
        deadline = time.monotonic() + 60
        pushed = b""
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while time.monotonic() < deadline:
                pushed = pushed or request * 500
                try:
                    pushed = pushed[sock.send(pushed) :]
                except BlockingIOError:
                    time.sleep(0.001)
    assert pull(source)


def test_too_many_transfers_are_refused(source):
    transport, _ = open_transport()
    other, _ = open_transport(7)
    name = transport.connect(other.descriptor())
    other.lock.acquire()  # its thread stands still, so that nothing finishes
    try:
        with pytest.raises(ResourceError, match="transfers"):
            for index in range(1, 10000):
                transport.submit(name, TransferPlan(index, 0, [1], [0], [0], 60.0))
    finally:
        other.lock.release()
        transport.close()
        other.close()


def test_names_of_peers_follow_from_their_epoch(source):
    transport, _ = open_transport()
    assert transport.connect(source.descriptor()) == peer_name("shm", source.epoch)
    transport.close()


def test_regions_are_checked():
    transport, _ = open_transport()
    for region in (
        Region(2, memoryview(bytearray(10)), 4, "l"),
        Region(2, memoryview(bytearray(8)), 0, "l"),
        Region(2, memoryview(bytearray(16))[::2], 4, "l"),
        Region(1, memoryview(bytearray(8)), 4, "l"),
    ):
        with pytest.raises(ConfigError):
            transport.register([region])
    transport.close()
