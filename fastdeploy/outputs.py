"""What the offline API returns, under vLLM's path; outputs of pooling come with fd-pooling."""

from __future__ import annotations

from typing import Any, Final

from fastdeploy_core.types import CompletionOutput, Logprob, RequestMetrics, RequestOutput

# One class of fd-pooling has what vLLM has four for.
_OF_POOLING: Final = {
    "PoolingRequestOutput": "PoolingRequestOutput",
    "EmbeddingRequestOutput": "PoolingRequestOutput",
    "ClassificationRequestOutput": "PoolingRequestOutput",
    "ScoringRequestOutput": "PoolingRequestOutput",
    "PoolingOutput": "PoolingOutput",
    "EmbeddingOutput": "EmbeddingOutput",
    "ClassificationOutput": "ClassificationOutput",
    "ScoringOutput": "ScoringOutput",
}


def __getattr__(name: str) -> Any:
    if name in _OF_POOLING:
        from fd_pooling import offline

        return getattr(offline, _OF_POOLING[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]
