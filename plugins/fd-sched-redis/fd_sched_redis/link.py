"""The sockets between front ends and instances: output and aborts, which never pass through Redis.

A front end listens and instances connect to it. Without a key file the socket is a file in a folder
that only this user can enter. With one it is a TCP port, both sides prove with CURVE that they know
the key, and everything is encrypted. One thread of each side owns its sockets.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from fastdeploy_core.types import Request, RequestOutputDelta, TokenDeltas

from .options import Options, SocketKeys

logger = logging.getLogger(__name__)

Output = RequestOutputDelta | TokenDeltas
MAX_UNSENT = 100_000  # messages queued for a process that does not read
POLL_MS = 100
_FOLDER = "fd-sched-redis-"


class Hello(msgspec.Struct, tag=True):
    """Instance to front end, again and again: it lives."""

    instance: str


class Started(msgspec.Struct, tag=True):
    """Instance to front end: it was given a request that another one had, so what that one says of
    it is out of date."""

    request_id: str
    attempt: int


class Deltas(msgspec.Struct, tag=True):
    """Instance to front end: output."""

    deltas: list[RequestOutputDelta | TokenDeltas]


class Abort(msgspec.Struct, tag=True):
    """Front end to instance: stop these requests or branches."""

    request_ids: list[str]


class Offer(msgspec.Struct, tag=True):
    """Front end to instance, while Redis is away: run this request."""

    request: Request


_encode = msgspec.msgpack.Encoder().encode
_from_instance = msgspec.msgpack.Decoder(Hello | Started | Deltas)
_from_front = msgspec.msgpack.Decoder(Abort | Offer)


class _Waker:
    """Lets any thread end another one's wait."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()
        os.set_blocking(self.reading, False)
        os.set_blocking(self._writing, False)

    def wake(self) -> None:
        """End the wait; safe after close."""
        with contextlib.suppress(OSError):  # full: it is awake already
            os.write(self._writing, b"w")

    def clear(self) -> None:
        """Wait again from now on."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.reading, 4096)

    def close(self) -> None:
        """Give the descriptors back."""
        reading, writing, self._writing = self.reading, self._writing, -1
        os.close(writing)
        os.close(reading)


class FrontLink:
    """A front end's socket. `on_deltas(instance, deltas)`, `on_started(request_id, attempt)` and
    `on_unreachable(request)`, an offer that did not arrive, are called in its thread."""

    def __init__(
        self,
        options: Options,
        on_deltas: Callable[[str, list[Output]], None],
        on_started: Callable[[str, int], None],
        on_unreachable: Callable[[Request], None],
    ) -> None:
        self._on_deltas, self._on_started = on_deltas, on_started
        self._on_unreachable = on_unreachable
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        keys = SocketKeys.of(options)
        self._guard = None if keys is None else _only_instances(self._context, self._socket, keys)
        self._folder: str | None = None
        self.address = self._bind(options)
        self._num_unreadable = 0
        self._heard: dict[str, tuple[bytes, float]] = {}  # instances: identity, when last
        self._outbox: deque[tuple[str, Any]] = deque()
        self._waker = _Waker()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fd-redis-answers", daemon=True)
        self._thread.start()

    def _bind(self, options: Options) -> str:
        if options.listen_host:
            host = options.listen_host
            name = f"[{host}]" if ":" in host else host
            if ":" in host:
                self._socket.setsockopt(zmq.IPV6, 1)
            port = options.listen_port
            if port:
                self._socket.bind(f"tcp://{name}:{port}")
            else:
                port = self._socket.bind_to_random_port(f"tcp://{name}")
            return f"tcp://{name}:{port}"
        _remove_old_folders()
        self._folder = tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-")
        address = f"ipc://{self._folder}/answers"
        self._socket.bind(address)
        return address

    def ages(self) -> dict[str, float]:
        """Connected instances, each with the seconds since it was heard last."""
        now = time.monotonic()
        return {name: now - heard for name, (_, heard) in list(self._heard.items())}

    def send(self, instance: str, message: Abort | Offer) -> None:
        """Send to an instance; an abort for one that is not connected is dropped."""
        self._outbox.append((instance, message))
        self._waker.wake()

    def close(self) -> None:
        """Stop the thread, close the socket."""
        self._stopping.set()
        self._waker.wake()
        self._thread.join()
        self._waker.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.reading, zmq.POLLIN)
        while not self._stopping.is_set():
            poller.poll(POLL_MS * 10)
            self._waker.clear()
            while self._outbox:
                self._send(*self._outbox.popleft())
            try:
                while self._socket.poll(0) and not self._outbox:
                    self._hear()
            except Exception:
                logger.exception("a message of an instance could not be handled")

    def _hear(self) -> None:
        frames = self._socket.recv_multipart()
        try:
            if len(frames) != 2:
                raise msgspec.ValidationError(f"{len(frames)} frames instead of 2")
            message = _from_instance.decode(frames[1])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._num_unreadable += 1
            if self._num_unreadable & (self._num_unreadable - 1) == 0:  # 1, 2, 4, 8, ...
                logger.warning(
                    "%d unreadable messages of instances were dropped; the newest: %s",
                    self._num_unreadable,
                    error,
                )
            return
        if isinstance(message, Hello):
            self._heard[message.instance] = frames[0], time.monotonic()
            return
        if isinstance(message, Started):
            self._on_started(message.request_id, message.attempt)
            return
        name = frames[0].decode(errors="replace").rpartition("/")[0]
        self._on_deltas(name, message.deltas)

    def _send(self, instance: str, message: Abort | Offer) -> None:
        identity, _ = self._heard.get(instance, (b"", 0.0))
        try:
            if not identity:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            self._socket.send_multipart([identity, _encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._heard.pop(instance, None)
            if isinstance(message, Offer):
                self._on_unreachable(message.request)


def _only_instances(
    context: zmq.Context[Any], listener: zmq.Socket[Any], keys: SocketKeys
) -> ThreadAuthenticator:
    """Let only peers in that prove to be instances of this deployment."""

    class Allowed:
        def callback(self, domain: str, key: bytes) -> bool:
            """Whether the peer's key is the instances'."""
            return key == keys.instance.public

    guard = ThreadAuthenticator(context, log=logging.getLogger(f"{__name__}.guard"))
    logging.getLogger(f"{__name__}.guard").setLevel(logging.ERROR)
    guard.start()
    guard.configure_curve_callback(domain="*", credentials_provider=Allowed())
    listener.setsockopt(zmq.CURVE_SERVER, 1)
    listener.setsockopt(zmq.CURVE_SECRETKEY, keys.front.secret)
    listener.setsockopt(zmq.CURVE_PUBLICKEY, keys.front.public)
    return guard


def _remove_old_folders() -> None:
    """Remove folders of processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        pid = path.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)


class InstanceLink:
    """An instance's sockets, one to each front end. `route(outputs)` says to whom output goes, and
    `on_message(front, message)` gets what front ends send; both are called in its thread."""

    def __init__(
        self,
        options: Options,
        instance: str,
        epoch: str,
        hello_s: float,
        route: Callable[[list[Output]], Iterable[tuple[str, list[Output]]]],
        on_message: Callable[[str, Abort | Offer], None],
    ) -> None:
        self._keys = SocketKeys.of(options)
        self._instance, self._hello_s = instance, hello_s
        self._identity = f"{instance}/{epoch}".encode()[-255:]
        self._route, self._on_message = route, on_message
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[Any]] = {}
        self._addresses: dict[str, str] = {}  # wanted; written whole
        self._outbox: deque[list[Output]] = deque()
        self._messages: deque[tuple[str, Started | Deltas]] = deque()
        self._waker = _Waker()
        self._stopping = threading.Event()
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="fd-redis-output", daemon=True)
        self._thread.start()

    def know(self, fronts: Mapping[str, str]) -> None:
        """Addresses of all front ends that live."""
        self._addresses = dict(fronts)
        self._waker.wake()

    def add(self, front: str, address: str) -> None:
        """The address of one more front end."""
        if front not in self._addresses:
            self.know({**self._addresses, front: address})

    def put(self, outputs: list[Output]) -> None:
        """Send output. Cheap: the step thread calls it."""
        self._outbox.append(outputs)
        self._waker.wake()

    def say(self, front: str, message: Started | Deltas) -> None:
        """Send to one front end."""
        self._messages.append((front, message))
        self._waker.wake()

    def close(self) -> None:
        """Send what is left, stop the thread, close the sockets."""
        self._stopping.set()
        self._waker.wake()
        self._thread.join()
        self._waker.close()
        self._context.destroy(linger=500)

    def _run(self) -> None:
        self._poller.register(self._waker.reading, zmq.POLLIN)
        next_hello_s = 0.0
        while True:
            is_last = self._stopping.is_set()
            now = time.monotonic()
            wait_s = 0.0 if is_last else max(0.0, next_hello_s - now)
            ready = dict(self._poller.poll(round(min(wait_s, self._hello_s) * 1000)))
            self._waker.clear()
            try:
                self._follow()
                if time.monotonic() >= next_hello_s:
                    next_hello_s = time.monotonic() + self._hello_s
                    for front in self._sockets:
                        self._send(front, Hello(self._instance))
                self._flush()
                for front, connection in list(self._sockets.items()):
                    if connection in ready:
                        self._hear(front, connection)
            except Exception:
                logger.exception("output could not be sent")
            if is_last:
                return

    def _follow(self) -> None:
        """Connect to new front ends, leave those that are gone."""
        wanted = self._addresses
        for front in [name for name in self._sockets if name not in wanted]:
            connection = self._sockets.pop(front)
            self._poller.unregister(connection)
            connection.close(0)
        for front, address in wanted.items():
            if front not in self._sockets:
                with contextlib.suppress(zmq.ZMQError):
                    self._connect(front, address)

    def _connect(self, front: str, address: str) -> None:
        path = address.removeprefix("ipc://")
        if path != address and not Path(path).exists():
            logger.error(
                "front end %s listens on a socket of its own host (%s); for instances on other "
                "hosts give it --scheduler-config.listen_host and all of them "
                "--scheduler-config.key_file",
                front,
                socket.gethostname(),
            )
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        connection = self._context.socket(zmq.DEALER)
        connection.setsockopt(zmq.IDENTITY, self._identity)
        connection.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        connection.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._keys is not None:
            connection.setsockopt(zmq.CURVE_SERVERKEY, self._keys.front.public)
            connection.setsockopt(zmq.CURVE_SECRETKEY, self._keys.instance.secret)
            connection.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.instance.public)
        if "[" in address:
            connection.setsockopt(zmq.IPV6, 1)
        connection.connect(address)
        self._sockets[front] = connection
        self._poller.register(connection, zmq.POLLIN)
        self._send(front, Hello(self._instance))

    def _flush(self) -> None:
        while self._messages:
            self._send(*self._messages.popleft())
        outputs: list[Output] = []
        while self._outbox:
            outputs += self._outbox.popleft()
        if outputs:
            for front, part in self._route(outputs):
                self._send(front, Deltas(part))

    def _send(self, front: str, message: Hello | Started | Deltas) -> None:
        connection = self._sockets.get(front)
        if connection is None:
            return  # it has died: nobody reads
        try:
            connection.send(_encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.error("front end %s does not take its output; some of it is lost", front)

    def _hear(self, front: str, connection: zmq.Socket[Any]) -> None:
        while connection.poll(0):
            try:
                message = _from_front.decode(connection.recv())
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                logger.warning("an unreadable message of a front end was dropped: %s", error)
                continue
            self._on_message(front, message)
