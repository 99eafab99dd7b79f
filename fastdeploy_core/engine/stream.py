"""One request's deltas on their way to its client, merged while the client is slow or wants chunks.

At most one merged delta waits: a client that stops reading costs the memory of its tokens and, when
these are too many, its request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from msgspec import Struct

from fastdeploy_core.errors import FastDeployError, RequestTimeout, WorkerError, error_named
from fastdeploy_core.types import FinishReason, Request, RequestOutputDelta, SequenceDelta

MAX_BUFFERED_BYTES = 256 * 1024
STALL_S = 30.0
TOKEN_BYTES = 32  # about the size of a Python integer in a list
LOGPROB_BYTES = 96  # the token id included


class OutputStream:
    """The stream of one request. Belongs to one event loop."""

    def __init__(self, request: Request, chunk_tokens: int = 1) -> None:
        """chunk_tokens: a delta waits until a sequence has this many new tokens. The first and the
        last delta come at once, and so does the end of any sequence."""
        self.request, self._chunk_tokens = request, chunk_tokens
        self._position = 0  # of the next delta from the engine
        self._delivered = 0  # deltas given to the client
        self._waiting: RequestOutputDelta | None = None
        self._num_bytes = 0
        self._stalled_s: float | None = None
        self._error: FastDeployError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.is_ended = False  # the engine owes nothing more
        self.is_repeated = False  # an engine was lost, and another one got the request
        self.began_s = 0.0  # by the clock of the event loop

    @property
    def has_output(self) -> bool:
        """Whether the engine has sent anything of it."""
        return self._position > 0

    def put_tokens(self, position: int, token_ids: Sequence[int], num_deltas: int = 1) -> bool:
        """Take new tokens of a request's only sequence: one delta, or several joined."""
        waiting = self._waiting
        if waiting is None or self.is_ended or position != self._position:
            sequences = [SequenceDelta(token_ids=list(token_ids))]
            return self.put(
                RequestOutputDelta(
                    request_id=self.request.request_id, position=position, sequences=sequences
                ),
                num_deltas,
            )
        self._position += num_deltas
        if waiting.sequences:
            waiting.sequences[0].token_ids.extend(token_ids)
        else:
            waiting.sequences.append(SequenceDelta(token_ids=list(token_ids)))
        self._num_bytes += TOKEN_BYTES * len(token_ids)
        if self._chunk_tokens > 1:
            self._wake()
        return self._num_bytes <= MAX_BUFFERED_BYTES or not self._has_stalled()

    def put(self, delta: RequestOutputDelta, num_deltas: int = 1) -> bool:
        """Take a delta from the engine, or several joined; False if the engine should stop: the
        client has not read for too long, or a delta before this one is missing."""
        if self.is_ended or delta.position < self._position:
            return True
        if delta.position > self._position:
            self.fail(
                WorkerError(f"output was lost between deltas {self._position} and {delta.position}")
            )
            return False
        self._position += num_deltas
        self.is_ended = delta.finished
        if self._waiting is None:
            self._waiting = delta
        else:
            _merge(self._waiting, delta)
        self._num_bytes += _num_bytes(delta)
        self._wake()
        return not self._has_stalled()

    def fail(self, error: FastDeployError) -> None:
        """End the stream with an error."""
        if self._error is None:
            self._error = error
        self.is_ended = True
        self._wake()

    async def get(self) -> RequestOutputDelta:
        """Everything new as one delta; raises the error that ended the stream."""
        while (delta := self._waiting) is None or not self._is_due(delta):
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._waiting = None
        self._num_bytes = 0
        self._stalled_s = None
        delta.position = self._delivered
        self._delivered += 1
        if delta.error is None:
            return delta
        error = error_named(delta.error_type, delta.error)
        if not any(seq.token_ids for seq in delta.sequences):
            raise error
        self._error = error  # raised by the next call, after the tokens that came before it
        delta.error, delta.error_type, delta.finished = None, "", False
        for seq in delta.sequences:  # else these tokens would look like a whole answer
            if seq.finish_reason is FinishReason.ERROR:
                seq.finish_reason = None
        return delta

    def is_due(self) -> bool:
        """Whether `get` would return now."""
        return self._waiting is not None and self._is_due(self._waiting)

    def _is_due(self, delta: RequestOutputDelta) -> bool:
        size = self._chunk_tokens
        if size == 1 or not self._delivered or self.is_ended or self._error is not None:
            return True
        return any(
            len(seq.token_ids) >= size or seq.finish_reason is not None for seq in delta.sequences
        )

    def _wake(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if self._error is not None or self.is_due():
            self._waiter.set_result(None)

    def _has_stalled(self) -> bool:
        if self._num_bytes <= MAX_BUFFERED_BYTES or self.is_ended or not self.is_due():
            return False
        now = time.monotonic()
        if self._stalled_s is None:
            self._stalled_s = now
        if now - self._stalled_s < STALL_S:
            return False
        self._waiting = None
        self.fail(RequestTimeout(f"the client did not read its output for {STALL_S:g} s"))
        return True


def _num_bytes(delta: RequestOutputDelta) -> int:
    size = 0
    for seq in delta.sequences:
        size += len(seq.token_ids) * TOKEN_BYTES
        for row in seq.logprobs or ():
            size += len(row.token_ids) * LOGPROB_BYTES
    return size


def _merge(first: RequestOutputDelta, second: RequestOutputDelta) -> None:
    """Append the second delta to the first."""
    by_index = {seq.index: seq for seq in first.sequences}
    for seq in second.sequences:
        known = by_index.get(seq.index)
        if known is None:
            first.sequences.append(seq)
            continue
        known.token_ids.extend(seq.token_ids)
        if seq.logprobs is not None:
            known.logprobs = [*(known.logprobs or []), *seq.logprobs]
        _take_set(known, seq, ("finish_reason", "stop_reason", "drafts", "pooled"))
    names = ("prompt_logprobs", "num_cached_tokens", "queue_s", "finished", "error", "error_type")
    _take_set(first, second, names)


def _take_set(first: Struct, second: Struct, names: Sequence[str]) -> None:
    """Copy those fields of the second record that say something; each comes once in a request."""
    for name in names:
        value = getattr(second, name)
        if value is not None and value is not False and value != "":
            setattr(first, name, value)
