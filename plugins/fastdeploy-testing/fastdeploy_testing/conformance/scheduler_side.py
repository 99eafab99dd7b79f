"""Requests and deltas as the request schedulers' conformance tests use them."""

from __future__ import annotations

import time

from fastdeploy_core.contracts.scheduler import Capacity
from fastdeploy_core.types import (
    FinishReason,
    Request,
    RequestOutputDelta,
    SamplingParams,
    SequenceDelta,
)

PLENTY = Capacity(num_requests=1000, num_free_blocks=10**6, block_size=64, num_tokens=10**9)


def request(name: str, *, tokens: int = 4, priority: int = 0) -> Request:
    """A small request."""
    return Request(
        request_id=name,
        prompt_token_ids=list(range(tokens)),
        sampling=SamplingParams(max_tokens=4),
        arrival_time_s=time.time(),
        priority=priority,
    )


def delta(taken: Request, position: int, *, finished: bool = False) -> RequestOutputDelta:
    """One token of a request as its engine would report it; another attempt reports another
    token."""
    token = 1000 * taken.attempt + position
    reason = FinishReason.STOP if finished else None
    return RequestOutputDelta(
        request_id=taken.request_id,
        position=position,
        attempt=taken.attempt,
        sequences=[SequenceDelta(token_ids=[token], finish_reason=reason)],
        finished=finished,
    )
