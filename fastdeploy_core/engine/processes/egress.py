"""Sends the engine's output to the front ends that asked for it: one thread, one socket each.

Columns of tokens are split by front end; the split is computed once and reused while the list of
requests stays the same.

If the model runs on the processors that front ends and clients also need, each chunk that they
handle takes time from the model. Then the thread rests after sending, so that with short steps a
stream gets several tokens at once; steps of tens of milliseconds are longer than a rest. A rest
ends early when many streams have begun or ended, because their clients send new requests next and
the batch would run empty.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import zmq

from fastdeploy_core.types import RequestOutputDelta, TokenDeltas, join_tokens

from . import wire

logger = logging.getLogger(__name__)

Output = RequestOutputDelta | TokenDeltas
MAX_UNSENT = 100_000  # messages queued for a process that does not read
# A chunk costs server and client some 50 us of a processor. With a rest 25 times as long, chunks
# take at most about a twenty-fifth of one. A reader sees 25 chunks per second as continuous.
REST_PER_CHUNK_S = 1.25e-3
MAX_REST_S = 40e-3
# Share of the streams served before a rest: when so many begin or end, the rest ends.
AWAKENING_SHARE = 0.25


class Routes:
    """Which front end asked for which request. Written by the ingress thread."""

    def __init__(self, num_front_ends: int) -> None:
        self._num_front_ends = num_front_ends
        self._owners: dict[str, int] = {}
        self._split_ids: list[str] = []
        self._split: list[tuple[int, list[int]]] = []

    def add(self, request_id: str, front_end: int) -> bool:
        """A front end sent this request; False if that is known already."""
        is_new = request_id not in self._owners
        if is_new and self._num_front_ends > 1:
            self._owners[request_id] = front_end
        return is_new

    def remove(self, request_id: str) -> None:
        """The request has been answered."""
        self._owners.pop(request_id, None)

    def remove_all(self, front_end: int) -> list[str]:
        """The front end is gone; returns its requests, whose output has no reader any more."""
        lost = [name for name, owner in list(self._owners.items()) if owner == front_end]
        for name in lost:
            self._owners.pop(name, None)
        return lost

    def sort(self, outputs: Sequence[Output]) -> Iterable[tuple[int, list[Output]]]:
        """Outputs by front end, in their order; outputs of unknown requests are left out."""
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
        tokens.num_deltas,
    )


class Egress:
    """The sending thread. `get` waits a moment for outputs; after `stop` the thread sends what is
    left and ends. `is_resting`: whether it rests after sending (see above)."""

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
        self._num_streams = 0  # streams that got something before this rest
        self._num_turns = 0  # streams that have begun or ended since
        self._awake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fd-egress", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, wait_s: float) -> None:
        """Send what is left, then end."""
        self._stopping.set()
        self._awake.set()
        self._thread.join(wait_s)

    def note(self, outputs: Iterable[Output]) -> None:
        """The core thread reports new output, which `get` returns from now on."""
        num_turns = sum(map(_is_turn, outputs)) if self._is_resting else 0
        if num_turns:
            self._num_turns += num_turns
            if self._num_turns >= AWAKENING_SHARE * self._num_streams:
                self._awake.set()

    def _run(self) -> None:
        while True:
            # Clear first: a thread that sets it from here on ends the next rest early.
            self._awake.clear()
            self._num_turns = 0
            is_last = self._stopping.is_set()
            outputs = self._get(not is_last)
            if self._is_resting and outputs:
                self._num_streams = num_streams(outputs)
            for front_end, part in self.routes.sort(joined(outputs)) if outputs else ():
                self._send(front_end, wire.encode(wire.Deltas(part)))
            if is_last:
                return
            if self._is_resting and outputs:
                self._awake.wait(rest_after(self._num_streams))

    def _send(self, front_end: int, data: bytes) -> None:
        try:
            self._sockets[front_end].send(data, zmq.NOBLOCK)
        except zmq.Again:
            # Streams of that front end will see the gap and fail; other front ends must not wait
            # for it.
            logger.error("front end %s does not take its output; some of it is lost", front_end)


def _is_turn(output: Output) -> bool:
    return isinstance(output, RequestOutputDelta) and (output.finished or not output.position)


def joined(outputs: Iterable[Output]) -> list[Output]:
    """The same output, with the tokens of successive steps for the same requests joined."""
    found: list[Output] = []
    # Lists of request ids are reused while they stay the same.
    for _, run in groupby(outputs, lambda o: isinstance(o, TokenDeltas) and id(o.request_ids)):
        parts = list(run)
        tokens = [part for part in parts if isinstance(part, TokenDeltas)]
        found += [join_tokens(tokens)] if tokens else parts
    return found


def num_streams(outputs: Iterable[Output]) -> int:
    """The number of streams that get something of these outputs."""
    streams: set[str] = set()
    for output in outputs:
        if isinstance(output, TokenDeltas):
            streams.update(output.request_ids)
        else:
            streams.add(output.request_id)
    return len(streams)


def rest_after(num_chunks: int) -> float:
    """Seconds to collect output after sending this many chunks."""
    return min(num_chunks * REST_PER_CHUNK_S, MAX_REST_S)


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str) -> Any:
    """A socket for sending."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
    socket.connect(address)
    return socket
