"""What the offline API returns, under vLLM's path; outputs of pooling come with fd-pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

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


class Answers(list[CompletionOutput]):
    """The answers to a prompt: a list, as vLLM has it. FastDeploy 2.x has the one answer itself, so
    `outputs.text` and the like are those of the first."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or not self:
                raise AttributeError(name)
            return getattr(self[0], name)


def __getattr__(name: str) -> Any:
    if name in _OF_POOLING:
        from fd_pooling import offline

        return getattr(offline, _OF_POOLING[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Answers", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]
