"""Carries what the engine has for clients to the front ends that asked: one thread, one socket each.

Tokens in columns are taken apart by front end, for which a list of requests that stays the same is
looked at only once.

Where the model runs on the processors that front ends and clients need, too, each chunk that they handle
takes them from the model. There the thread rests after it sent something, so that a stream gets several
tokens at once when steps are short; steps of tens of milliseconds find it awake.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from fastdeploy_core.types import RequestOutputDelta, TokenDeltas

from . import wire

logger = logging.getLogger(__name__)

Output = RequestOutputDelta | TokenDeltas
MAX_UNSENT = 100_000  # messages that wait for a process that does not read
# A chunk takes server and client some 50 us of a processor: with ten times as long a rest, chunks never
# take more than about a tenth of one. And no reader sees fifty chunks in a second as anything but a flow.
REST_PER_CHUNK_S = 500e-6
MAX_REST_S = 20e-3


class Routes:
    """Which front end asked for which request. Written by the ingress thread."""

    def __init__(self, num_front_ends: int) -> None:
        self._num_front_ends = num_front_ends
        self._owners: dict[str, int] = {}
        self._split_ids: list[str] = []
        self._split: list[tuple[int, list[int]]] = []

    def add(self, request_id: str, front_end: int) -> None:
        """A front end put this request."""
        if self._num_front_ends > 1:
            self._owners[request_id] = front_end

    def remove(self, request_id: str) -> None:
        """It was answered already."""
        self._owners.pop(request_id, None)

    def remove_all(self, front_end: int) -> list[str]:
        """The front end is gone; returns the requests that nobody waits for any more."""
        lost = [name for name, owner in list(self._owners.items()) if owner == front_end]
        for name in lost:
            self._owners.pop(name, None)
        return lost

    def sort(self, outputs: Sequence[Output]) -> Iterable[tuple[int, list[Output]]]:
        """Outputs by front end, in their order; those of unknown requests are left out."""
        if self._num_front_ends == 1:
            return [(0, list(outputs))]
        found: dict[int, list[Output]] = {}
        for output in outputs:
            if isinstance(output, TokenDeltas):
                for owner, part in self._parts(output):
                    found.setdefault(owner, []).append(part)
                continue
            asked = self._owners.get(output.request_id)
            if asked is not None:
                found.setdefault(asked, []).append(output)
                if output.finished:
                    self.remove(output.request_id)
        return found.items()

    def _parts(self, tokens: TokenDeltas) -> Iterable[tuple[int, TokenDeltas]]:
        if tokens.request_ids is not self._split_ids:
            self._split_ids = tokens.request_ids
            places: dict[int, list[int]] = {}
            for place, request_id in enumerate(tokens.request_ids):
                owner = self._owners.get(request_id)
                if owner is not None:
                    places.setdefault(owner, []).append(place)
            self._split = list(places.items())
        for owner, chosen in self._split:
            yield owner, _take(tokens, chosen)


def _take(tokens: TokenDeltas, places: list[int]) -> TokenDeltas:
    request_ids, positions = tokens.request_ids, tokens.positions
    attempts, token_ids, counts = tokens.attempts, tokens.token_ids, tokens.counts
    if counts is None:
        chosen = [token_ids[place] for place in places]
    else:
        pieces = list(tokens.pieces())
        chosen = [token for place in places for token in pieces[place]]
        counts = [counts[place] for place in places]
    return TokenDeltas(
        [request_ids[place] for place in places],
        [positions[place] for place in places],
        [attempts[place] for place in places],
        chosen,
        counts,
    )


class Egress:
    """The thread. `get` waits a moment for outputs; after `stop` it sends what is left and ends.
    `is_resting`: whether it rests after it sent something (see above)."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Sequence[str],
        get: Callable[[bool], list[Output]],
        is_resting: bool = False,
    ) -> None:
        self.routes = Routes(len(addresses))
        self._sockets = [connect(context, address) for address in addresses]
        self._get = get
        self._is_resting = is_resting
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fd-egress", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self, wait_s: float) -> None:
        """Send what there is and end."""
        self._stopping.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while True:
            is_last = self._stopping.is_set()
            outputs = self._get(not is_last)
            for front_end, part in self.routes.sort(outputs) if outputs else ():
                self._send(front_end, wire.encode(wire.Deltas(part)))
            if is_last:
                return
            if self._is_resting and outputs:
                self._stopping.wait(rest_after(outputs))

    def _send(self, front_end: int, data: bytes) -> None:
        try:
            self._sockets[front_end].send(data, zmq.NOBLOCK)
        except zmq.Again:
            # Its streams will see the gap and fail; nobody else may wait for it.
            logger.error("front end %s does not take its output; some of it is lost", front_end)


def rest_after(outputs: Iterable[Output]) -> float:
    """Seconds for which output gathers after this was sent."""
    streams: set[str] = set()
    for output in outputs:
        if isinstance(output, TokenDeltas):
            streams.update(output.request_ids)
        else:
            streams.add(output.request_id)
    return min(len(streams) * REST_PER_CHUNK_S, MAX_REST_S)


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str) -> Any:
    """A socket that something is sent to."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
    socket.connect(address)
    return socket
