"""The answer to a request that does not run."""

from __future__ import annotations

from fastdeploy_core.errors import FastDeployError, InvalidRequest, QueueFull, Unavailable
from fastdeploy_core.types import Request, RequestOutputDelta


def refusal(request: Request, error: Exception) -> RequestOutputDelta:
    """Why a request does not run; internal errors are not described to the client."""
    is_ours = isinstance(error, FastDeployError)
    return RequestOutputDelta(
        request_id=request.request_id,
        attempt=request.attempt,
        sequences=[],
        finished=True,
        error=str(error) if is_ours else "this request could not be started; see the server's log",
        error_type=type(error).__name__ if is_ours else "FastDeployError",
    )


def refused(request: Request, reason: str) -> RequestOutputDelta:
    """The same for a reason that RequestScheduler.put_requests gave."""
    kinds = {"queue full": QueueFull, "unavailable": Unavailable}
    word, _, text = reason.partition(": ")
    delta = refusal(request, InvalidRequest(reason))
    if word in kinds:
        delta.error_type = kinds[word].__name__
    if word == "unavailable":
        delta.error = text
    return delta
