"""The answer to a request that does not run."""

from __future__ import annotations

from fastdeploy_core.errors import FastDeployError, RequestError
from fastdeploy_core.types import Request, RequestOutputDelta


def refusal(request: Request, error: Exception) -> RequestOutputDelta:
    """Why a request does not run; internal errors are not described to the client."""
    is_ours = isinstance(error, FastDeployError)
    field = f":{error.param}" if isinstance(error, RequestError) and error.param else ""
    return RequestOutputDelta(
        request_id=request.request_id,
        attempt=request.attempt,
        sequences=[],
        finished=True,
        error=str(error) if is_ours else "this request could not be started; see the server's log",
        error_type=type(error).__name__ + field if is_ours else "FastDeployError",
    )
