"""Follows the KV events of one engine: subscribes, asks again for what it missed, forgets an engine
that is lost."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from .cached_blocks import EventIndex

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 1000
SILENT_MS = 3000  # without an answer to heartbeats the engine is lost
REPLAY_TIMEOUT_S = 2.0
END = b"\xff" * 8
MALFORMED = (msgspec.MsgspecError, ValueError, KeyError, TypeError, IndexError, OverflowError)


@dataclass(frozen=True, slots=True)
class Publisher:
    """Where one engine of an instance publishes."""

    instance: str
    endpoint: str
    replay: str = ""  # empty: what it had stored before is never known


class Follower:
    """One publisher's subscriber."""

    def __init__(
        self, context: zmq.asyncio.Context, index: EventIndex, publisher: Publisher, engine: int
    ) -> None:
        """engine: a number for each publisher of an instance."""
        self._context = context
        self._index = index
        self._publisher = publisher
        self._key = publisher.instance, engine
        self._next: int | None = None  # number of the batch that comes next; None: any

    async def run(self) -> None:
        """Until it is cancelled."""
        events = self._context.socket(zmq.SUB)
        events.linger = 0
        events.set_hwm(0)  # what is held here is small, and a gap costs a replay
        events.heartbeat_ivl, events.heartbeat_timeout = HEARTBEAT_MS, SILENT_MS
        events.reconnect_ivl, events.reconnect_ivl_max = 100, 2000
        events.subscribe(b"")
        monitor = events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        events.connect(self._publisher.endpoint)
        poller = zmq.asyncio.Poller()
        poller.register(events, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            while True:
                ready = dict(await poller.poll())
                # A lost connection first: what comes after it is of another process.
                if monitor in ready:
                    change = parse_monitor_message(await monitor.recv_multipart())
                    await self._changed(change["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
                elif events in ready:
                    await self._take(await events.recv_multipart())
        finally:
            self._index.forget(*self._key)
            events.disable_monitor()
            events.close(0)

    async def _changed(self, is_connected: bool) -> None:
        name = self._publisher.instance
        self._index.forget(*self._key)
        self._next = None
        if is_connected:
            self._index.begin(*self._key)
            logger.info("instance %s: its KV events are followed", name)
            if self._publisher.replay:
                self._next = 0
                await self._catch_up()
        else:
            logger.warning("instance %s: lost its KV events; what was sent there counts", name)

    async def _take(self, message: list[bytes]) -> None:
        """A batch was published."""
        if not self._index.follows(self._publisher.instance) or len(message) != 3:
            return
        number = int.from_bytes(message[1], "big")
        if self._next is not None and number > self._next and self._publisher.replay:
            await self._catch_up()
        if self._next is None or number == self._next:
            self._apply(number, message[2])
        elif number > self._next:  # lost for good: what was removed meanwhile is not known
            self._restart(number)
            self._apply(number, message[2])

    async def _catch_up(self) -> None:
        """Asks for all batches from the next one on."""
        assert self._next is not None  # noqa: S101
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        try:
            socket.connect(self._publisher.replay)
            await socket.send_multipart((b"", self._next.to_bytes(8, "big")))
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    _, first, payload = await socket.recv_multipart()
                if first == END:
                    return
                number = int.from_bytes(first, "big")
                if number > self._next:  # it keeps no older ones
                    self._restart(number)
                if number == self._next:
                    self._apply(number, payload)
        except (TimeoutError, ValueError):
            logger.warning("instance %s: no replay of its KV events", self._publisher.instance)
        finally:
            socket.close(0)

    def _restart(self, number: int) -> None:
        self._index.begin(*self._key)
        self._next = number

    def _apply(self, number: int, payload: bytes) -> None:
        try:
            _, events, *_ = msgspec.msgpack.decode(payload)
            self._index.apply(*self._key, [_fields(event) for event in events])
        except MALFORMED as error:
            logger.warning("instance %s: unreadable KV events: %r", self._key[0], error)
            self._index.begin(*self._key)
        self._next = number + 1


def _fields(event: Any) -> list[Any]:
    """An event as its kind and fields; newer releases of vLLM write maps."""
    if not isinstance(event, dict):
        return list(event)
    names = (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
        *("medium", "lora_name", "extra_keys"),
    )
    return [event["type"], *(event.get(name) for name in names)]
