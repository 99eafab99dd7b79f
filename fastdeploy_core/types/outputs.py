"""What the offline API returns and the server renders. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position; rank 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class SpeculateMetrics:
    """How the drafts of a request's answers fared. Names are FastDeploy's; a "head" is a position
    among the drafts of a step, counted from 0."""

    accepted_tokens: int = 0
    rejected_tokens: int = 0
    accept_ratio: float = 0.0  # accepted drafts divided by all drafts
    average_accept_length: float = 0.0  # tokens per step with drafts, the sampled token included
    accepted_tokens_per_head: list[int] = field(default_factory=list)
    # by position: the ratio among steps that had a draft there
    accept_ratio_per_head: list[float] = field(default_factory=list)


@dataclass(slots=True)
class RequestMetrics:
    """Moments of a request's life, seconds since the epoch, and durations in seconds."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    queue_s: float | None = None
    speculate_metrics: SpeculateMetrics | None = None  # None: nothing was drafted


@dataclass(slots=True)
class CompletionOutput:
    """One of the n answers to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    pooled: bytes | None = None  # float32: what the prompt was pooled to

    @property
    def finished(self) -> bool:
        """Whether nothing more follows."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int | None = None
    error: str | None = None  # why it failed (finish_reason "error"); safe to show to the client
    error_type: str = ""  # class name in errors.py
