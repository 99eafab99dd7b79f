"""Who has no key, who changes bytes on the way, and how soon a lost peer is noticed; the rest is
the conformance kit's."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fd_kv_tcp import wire
from fd_kv_tcp.transport import ADDRESS_VARIABLE, TcpTransport
from fd_kv_tcp.wire import Channel
from fd_scale_out.receiver_driven import Descriptor, WireError, descriptor_decoder, encode

from fastdeploy_core.contracts.kv_transport import (
    Region,
    TransferEvent,
    TransferEventKind,
    TransferPlan,
    TransportOptions,
)
from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_testing.peer import RemotePeer

SECRET = b"s" * 32
BLOCK = 4096


def open_transport(value: int = 0, **options: Any) -> tuple[TcpTransport, list[bytearray]]:
    """With two regions of eight blocks."""
    memory = [bytearray([value + i]) * (8 * BLOCK) for i in range(2)]
    transport = TcpTransport(TransportOptions(**{"secret": SECRET} | options))
    for number, content in enumerate(memory):
        transport.register([Region(number, memoryview(content), BLOCK, "layout")])
    return transport, memory


@pytest.fixture
def source() -> Iterator[TcpTransport]:
    transport, _ = open_transport(7)
    yield transport
    transport.close()


def events_until(
    transport: TcpTransport, done: Callable[[TransferEvent], bool], limit_s: float = 60
) -> TransferEvent:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for event in transport.poll():
            if done(event):
                return event
        time.sleep(0.001)
    raise AssertionError(f"nothing within {limit_s:g} s")


def pull(descriptor: bytes, **options: Any) -> bool:
    """Fetch a block of two regions the honest way; whether it arrived, and nothing else did."""
    transport, memory = open_transport(0, **options)
    try:
        name = transport.connect(descriptor)
        try:
            transport.submit(name, TransferPlan(1, 0, [1, 0], [3], [5], 20.0))
        except InvalidRequest:  # the peer has refused the connection already
            return False
        ends = (TransferEventKind.DONE, TransferEventKind.FAILED)
        end = events_until(transport, lambda e: e.transfer_id == 1 and e.kind in ends)
        for number, content in enumerate(memory):
            came = content[5 * BLOCK : 6 * BLOCK] == bytes([7 + number]) * BLOCK
            assert came == (end.kind is TransferEventKind.DONE)
            rest = content[: 5 * BLOCK] + content[6 * BLOCK :]
            assert rest == bytes([number]) * len(rest)
        return end.kind is TransferEventKind.DONE
    finally:
        transport.close()


def where(transport: TcpTransport) -> tuple[str, int]:
    host, _, port = descriptor_decoder.decode(transport.descriptor()).address.rpartition(":")
    return host, int(port)


def answer(sock: socket.socket) -> bytes:
    """Everything until the other side hangs up."""
    data = b""
    sock.settimeout(20)
    while True:
        try:
            part = sock.recv(65536)
        except ConnectionError:
            return data
        if not part:
            return data
        data += part


def test_one_transfer_fills_the_same_blocks_of_several_regions(source: TcpTransport) -> None:
    assert pull(source.descriptor())


def test_who_has_no_key_gets_a_nonce_and_nothing_else(source: TcpTransport) -> None:
    rng = random.Random(0)
    words = [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", wire.GREETING + b"n" * 32 + b"p" * 32]
    words += [rng.randbytes(rng.randrange(1, 3000)) for _ in range(30)]
    words += [wire.GREETING + rng.randbytes(rng.randrange(32, 3000)) for _ in range(30)]
    for data in words:
        with socket.create_connection(where(source)) as sock:
            with contextlib.suppress(OSError):  # it may have hung up already
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            got = answer(sock)
            assert len(got) in (0, wire.NONCE_BYTES) and b"\7" * 16 not in got
    assert pull(source.descriptor())


def test_a_recorded_handshake_cannot_be_replayed(source: TcpTransport) -> None:
    recorded: list[bytes] = []
    descriptor, stop = proxy(source, lambda data, way: (way or recorded.append(data), data)[1])
    assert pull(descriptor)
    stop()
    assert recorded
    with socket.create_connection(where(source)) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(b"".join(recorded))
        assert len(answer(sock)) <= wire.NONCE_BYTES
    assert pull(source.descriptor())


def test_strangers_who_say_little_keep_nobody_out(source: TcpTransport) -> None:
    """More of them than there are places, each of which greets one byte after the other."""
    strangers: list[socket.socket] = []
    is_over = threading.Event()

    def trickle() -> None:
        said: dict[socket.socket, int] = {}
        while not is_over.wait(0.1):
            for sock in list(strangers):
                with contextlib.suppress(OSError):
                    sock.send((wire.GREETING + b"n" * 1000)[(at := said.get(sock, 0)) :][:1])
                    said[sock] = at + 1

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        for _ in range(300):
            strangers.append(socket.create_connection(where(source)))
        assert pull(source.descriptor())
    finally:
        is_over.set()
        thread.join()
        for sock in strangers:
            sock.close()


def test_a_peer_has_the_whole_timeout_for_its_first_word() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def be_slow() -> None:
        sock = listener.accept()[0]
        time.sleep(1.5)
        Channel(sock, SECRET, is_client=False)

    thread = threading.Thread(target=be_slow)
    thread.start()
    with listener, socket.create_connection(listener.getsockname(), 4.0) as sock:
        Channel(sock, SECRET, is_client=True)
        thread.join()


def test_an_error_of_accept_ends_no_server(
    source: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, errors = socket.socket.accept, [OSError(24, "Too many open files")] * 2

    def fail(listener: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail)
    socket.create_connection(where(source)).close()  # the call under way returns
    assert pull(source.descriptor())
    assert not errors


def _pair() -> tuple[Channel, Channel, socket.socket]:
    """Two ends that know each other, and the socket that the second one reads."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.settimeout(20)
    made: list[Channel] = []
    thread = threading.Thread(target=lambda: made.append(Channel(theirs, SECRET, is_client=False)))
    thread.start()
    client = Channel(ours, SECRET, is_client=True)
    thread.join()
    return client, made[0], theirs


def test_10000_mutated_frames_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of a real conversation, each changed in one way; a reader with the right keys, in the
    right place of the stream, gives an error for every one of them."""
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *_: None)  # no TCP_NODELAY here
    client, server, sock = _pair()
    frames = []
    for message in (wire.Read([0, 1], [1, 2, 3]), wire.Note(b"hello"), wire.Ping()):
        client.send(message)
        frames.append(sock.recv(65536))
    client.send_data([memoryview(b"\7" * 500), memoryview(b"\10" * 500)])
    frames.append(sock.recv(65536))
    rng, changed = random.Random(1), 0
    for number in range(10_000):
        place = rng.randrange(4)
        frame = bytearray(frames[place])
        how = number % 5
        if how == 0:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        elif how == 1:
            del frame[rng.randrange(len(frame)) :]
        elif how == 2:
            at = rng.randrange(len(frame))
            frame[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif how == 3:
            frame[:] = frames[(place + 1 + rng.randrange(3)) % 4]
        else:
            frame[rng.randrange(len(frame)) :] = rng.randbytes(rng.randrange(1, 99))
        if frame == frames[place]:
            continue
        changed += 1
        reader, writer = socket.socketpair()
        writer.sendall(frame)
        writer.close()
        reader.settimeout(20)
        server._sock, server._num_in = reader, place
        found = bytearray(1000)
        with pytest.raises(WireError):
            if place == 3:
                server.receive_data(memoryview(found))
            else:
                server.receive()
            raise AssertionError(f"{frame.hex()} was taken for a frame")
        reader.close()
    assert changed > 9_000


def proxy(
    source: TcpTransport, change: Callable[[bytes, int], bytes]
) -> tuple[bytes, Callable[[], None]]:
    """A descriptor of somebody in the middle, who passes on change(data, way); way 0: to the
    source."""
    listener = socket.create_server(("127.0.0.1", 0))
    there = descriptor_decoder.decode(source.descriptor())
    fields = {name: getattr(there, name) for name in there.__struct_fields__}
    mine = Descriptor(**fields | {"address": f"127.0.0.1:{listener.getsockname()[1]}"})

    def carry(one: socket.socket, other: socket.socket) -> None:
        ends = [one, other]
        with one, other:
            while True:
                for end in select.select(ends, [], [])[0]:
                    try:
                        data = end.recv(65536)
                        if not data:
                            return
                        ends[1 - ends.index(end)].sendall(change(data, ends.index(end)))
                    except OSError:
                        return

    def accept() -> None:
        while True:
            try:
                sock = listener.accept()[0]
            except OSError:
                return
            other = socket.create_connection(where(source))
            threading.Thread(target=carry, args=(sock, other), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()

    def stop() -> None:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()

    return encode(mine), stop


@pytest.mark.parametrize("seed", range(40))
def test_bytes_changed_on_the_way_never_reach_a_block(source: TcpTransport, seed: int) -> None:
    """pull() itself looks at every byte of the destination."""
    rng, lock = random.Random(seed), threading.Lock()
    left = [rng.randrange(1, 12000)]  # bytes until the change
    done: list[int] = []

    def change(data: bytes, way: int) -> bytes:
        with lock:
            at, left[0] = left[0], left[0] - len(data)
            if done or at >= len(data):
                return data
            done.append(at)
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]

    descriptor, stop = proxy(source, change)
    # What is changed when all has arrived, such as a farewell, harms nothing.
    assert pull(descriptor, progress_timeout_s=1.0) or done
    stop()
    assert pull(source.descriptor())


@pytest.mark.parametrize(("fault", "timeout_s"), [("kill", 600.0), ("freeze", 1.0)])
def test_a_lost_peer_is_noticed_in_time(fault: str, timeout_s: float) -> None:
    """Without a transfer under way; one that ended, without a timeout."""
    options = TransportOptions(secret=SECRET, progress_timeout_s=timeout_s)
    remote = RemotePeer("tcp", options, num_blocks=8, block_bytes=BLOCK)
    transport = TcpTransport(options)
    memory = bytearray(8 * BLOCK)
    transport.register([Region(1, memoryview(memory), BLOCK, "layout")])
    try:
        name = transport.connect(remote.descriptor)
        transport.submit(name, TransferPlan(1, 0, [1], [0], [0], 20.0))
        events_until(transport, lambda e: e.kind is TransferEventKind.DONE)
        getattr(remote, fault)()
        down = events_until(transport, lambda e: e.kind is TransferEventKind.PEER_DOWN)
        assert down.peer == name and down.reason
    finally:
        transport.close()
        remote.close()


@pytest.mark.parametrize("secret", [b"", b"x" * 31])
def test_short_secrets_are_refused(secret: bytes) -> None:
    with pytest.raises(ConfigError, match="32"):
        TcpTransport(TransportOptions(secret=secret))


@pytest.mark.parametrize("address", ["127.0.0.1:http", "127.0.0.1:70000", "203.0.113.1"])
def test_an_address_that_is_not_ours_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, address)
    with pytest.raises(ConfigError, match=ADDRESS_VARIABLE):
        TcpTransport(TransportOptions(secret=SECRET))
