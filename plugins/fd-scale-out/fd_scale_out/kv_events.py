"""Publishes which blocks the prefix cache holds, so that routers know what each engine has cached.

ZeroMQ and MessagePack as vLLM's KVEventsConfig has them: a PUB socket sends (topic, number, batch),
a batch for each step that changed the cache; a ROUTER socket sends batches again, from the number
that is asked for on. Numbers have 8 bytes, big endian, and start at 0 with an empty cache. A block
that is only in host memory can be hit, so it counts as stored.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from fastdeploy_core.config import KVEventsConfig
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.kvcache import CacheEntry

MEDIUM = "GPU"  # what vLLM calls an engine's own memory, whatever the device
END = (-1).to_bytes(8, "big", signed=True)  # of a replay


class KVEvents:
    """Entry point `kv-events`: a prefix cache's `on_change`, and the publisher. The core's thread
    calls it."""

    def __init__(self, config: KVEventsConfig, block_size: int, lookahead: int, rank: int) -> None:
        """rank: of this engine among those of one port. ConfigError where an address is taken."""
        self._sizes = block_size, lookahead
        self._rank = rank
        self._topic = config.topic.encode()
        self._events: list[list[Any]] = []  # fields in vLLM's order, the kind first
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(config.hwm)
        is_bound = "*" in config.endpoint or config.endpoint.startswith("ipc://")
        self._open(self._publisher, config.endpoint, is_bound)
        if config.replay_endpoint:
            replay = self._context.socket(zmq.ROUTER)
            replay.set_hwm(0)  # else what a subscriber has no room for would be dropped
            self._open(replay, config.replay_endpoint, True)
            threading.Thread(target=self._replay, args=(replay,), daemon=True).start()

    def note(self, entry: CacheEntry | None, is_stored: bool) -> None:
        """A block can be hit from now on, or cannot any more; None: no block can."""
        last: list[Any] = self._events[-1] if self._events else [""]
        if entry is None:
            self._events.append(["AllBlocksCleared"])
        elif is_stored:
            self._store(entry, last)
        elif last[0] == "BlockRemoved":
            last[1].append(_hash(entry))
        else:
            self._events.append(["BlockRemoved", [_hash(entry)], MEDIUM])

    def publish(self) -> None:
        """Send what happened since the last call; never waits."""
        if self._events:
            number = self._next.to_bytes(8, "big")
            payload = msgspec.msgpack.encode((time.time(), self._events, self._rank))
            self._sent.append((number, payload))
            self._publisher.send_multipart((self._topic, number, payload))
            self._next, self._events = self._next + 1, []

    def close(self) -> None:
        """Close the sockets."""
        self._publisher.close(0)
        self._context.term()  # ends the other thread

    def _store(self, entry: CacheEntry, last: list[Any]) -> None:
        parent = None if entry.parent is None else _hash(entry.parent)
        size, more = self._sizes
        # After its tokens an entry has those of the look-ahead, then what pictures are made from.
        tokens = memoryview(entry.tokens)[: 4 * size].cast("I").tolist()
        salt, adapter, routes = entry.scope
        extra = [key for key in (salt, routes) if key and parent is None]
        if pictures := entry.tokens[4 * (size + more) :]:
            extra.append(pictures.hex())
        if last[0] == "BlockStored" and last[1][-1] == parent and not (extra or last[8]):
            last[1].append(_hash(entry))
            last[3] += tokens
        else:
            event = ["BlockStored", [_hash(entry)], parent, tokens, size, None, MEDIUM]
            self._events.append([*event, adapter or None, [extra] if extra else None])

    def _open(self, socket: zmq.Socket[bytes], address: str, is_bound: bool) -> None:
        try:
            if self._rank and address.startswith("tcp://"):
                base, _, port = address.rpartition(":")
                address = f"{base}:{int(port) + self._rank}"
            elif self._rank:
                address = f"{address}_dp{self._rank}"
            (socket.bind if is_bound else socket.connect)(address)
        except (zmq.ZMQError, ValueError) as error:
            self._context.destroy(0)
            raise ConfigError(
                f"--kv-events-config: cannot open {address}: {error}; choose a free address"
            ) from None

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """A thread: answers a number with the batches from there on, and an end."""
        socket.linger = 0
        try:
            while True:
                *envelope, first = socket.recv_multipart()
                for number, payload in tuple(self._sent):
                    if number >= first and len(first) == 8:
                        socket.send_multipart((*envelope, number, payload))
                socket.send_multipart((*envelope, END, b""))
        except zmq.ContextTerminated:
            socket.close()


def _hash(entry: CacheEntry) -> int:
    return int.from_bytes(entry.key[-8:], "big")
