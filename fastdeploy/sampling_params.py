"""Sampling parameters with the names that vLLM and FastDeploy 2.x have for them."""

from __future__ import annotations

import copy
import enum
from typing import TYPE_CHECKING, Any, Final, Self

from fastdeploy_core import types
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import StructuredOutputsParams

if TYPE_CHECKING:
    from fd_beam_search.params import BeamSearchParams

# FastDeploy 2.x's name of the same class.
GuidedDecodingParams = StructuredOutputsParams

# Other projects' names of fields.
_SAME: Final = {
    "extra_args": "logits_processors_args",
    "guided_decoding": "structured_outputs",
    "reasoning_max_tokens": "thinking_token_budget",
}
# What cannot be had, and why; a value that asks for nothing is taken.
_REFUSED: Final = {
    "flat_logprobs": "log-probabilities come as one dictionary for each token",
    "logits_processors": "LLM(logits_processors=[...]) loads them for all requests",
    "prompt_logprob_start": "prompt_logprobs are those of the whole prompt",
    "prompt_logprob_token_ids": "prompt_logprobs=-1 gives those of every token",
    "repetition_detection": "use repetition_penalty or frequency_penalty",
    "routed_experts_prompt_start": "an output tells the experts of all tokens",
    "skip_reading_prefix_cache": "give the prompt a cache_salt of its own",
    "stream_interval": "stream=True gives the tokens of each step; servers have stream_interval",
    "temp_scaled_logprobs": "LLM(logprobs_mode=...) chooses for all requests",
    "top_p_normalized_logprobs": "LLM(logprobs_mode=...) chooses for all requests",
    "trace_decode_token_ids": "put the tokens into the prompt and ask for prompt_logprobs",
    "truncate_prompt_tokens": "generate(..., tokenization_kwargs={'truncate_prompt_tokens': N})",
    "watermarking": "answers carry no watermark",
}


class RequestOutputKind(enum.Enum):
    """What vLLM's engines return while a request runs; see SamplingParams."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(types.SamplingParams, kw_only=True):
    """How one request is sampled; InvalidRequest names the field that is wrong or that cannot be
    had. Outputs of LLM.generate are whole whatever `output_kind` says; stream=True gives pieces."""

    extra_args: dict[str, Any] | None = None
    guided_decoding: StructuredOutputsParams | None = None
    reasoning_max_tokens: int | None = None
    best_of: int | None = None
    output_kind: Any = None
    skip_clone: bool = False
    flat_logprobs: bool = False
    logits_processors: Any = None
    prompt_logprob_start: int | None = None
    prompt_logprob_token_ids: list[int] | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int = 0
    skip_reading_prefix_cache: bool | None = None
    stream_interval: int | None = None
    temp_scaled_logprobs: bool = False
    top_p_normalized_logprobs: bool = False
    trace_decode_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    watermarking: bool | None = None

    def __post_init__(self) -> None:
        for name, reason in _REFUSED.items():
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not supported; {reason}", param=name)
        if self.best_of not in (None, self.n):
            raise InvalidRequest(
                f"best_of ({self.best_of}) must be n ({self.n}); sample more with n, and choose by "
                "cumulative_logprob",
                param="best_of",
            )
        for theirs, ours in _SAME.items():
            value = getattr(self, theirs)
            if value is not None:
                if getattr(self, ours) not in (None, value):
                    raise InvalidRequest(f"{theirs} and {ours} differ; give one", param=theirs)
                setattr(self, ours, value)
                setattr(self, theirs, None)
        self.output_kind = None  # any class's, which ranks could not read
        super().__post_init__()

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """The same, where None stands for a field's default."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    def clone(self) -> Self:
        """A copy that may be changed."""
        return copy.deepcopy(self)


def __getattr__(name: str) -> Any:
    if name == "BeamSearchParams":
        from fd_beam_search.params import BeamSearchParams

        return BeamSearchParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
