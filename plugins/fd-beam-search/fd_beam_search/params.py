"""What `LLM.beam_search` takes and returns. Names are vLLM's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import Logprob

EarlyStopping = bool | Literal["never"]


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """How beams are searched; InvalidRequest names the field that is wrong."""

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    # Taken as vLLM takes it: nothing is sampled, and the model's own log-probabilities count.
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: EarlyStopping = False
    stop_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequest(
                    f"{name} must be an integer of at least 1, got {value!r:.40}", param=name
                )
        check_search(self.length_penalty, self.early_stopping)


def check_search(length_penalty: float, early_stopping: Any) -> None:
    """InvalidRequest unless scores can be compared under these."""
    # A sum of log-probabilities is divided by the length to this power.
    if not (math.isfinite(length_penalty) and -10 <= length_penalty <= 10):
        raise InvalidRequest(
            f"length_penalty must be between -10 and 10, got {length_penalty!r:.40}",
            param="length_penalty",
        )
    if early_stopping not in (True, False, "never"):
        raise InvalidRequest(
            f'early_stopping must be true, false or "never", got {early_stopping!r:.40}',
            param="early_stopping",
        )


def check_mode(logprobs_mode: str) -> None:
    """InvalidRequest unless the engine tells log-probabilities."""
    if logprobs_mode.endswith("logits"):
        raise InvalidRequest(
            f"beam search adds log-probabilities, and this engine has --logprobs-mode "
            f"{logprobs_mode}; start it with raw_logprobs",
            param="use_beam_search",
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the likeliest continuations."""

    tokens: list[int]  # of the prompt and the continuation
    logprobs: list[dict[int, Logprob]]  # of the continuation
    cum_logprob: float  # the sum over the continuation
    score: float  # that divided by the continuation's length to the power of length_penalty
    text: str | None = None  # of prompt and continuation
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The continuations of a prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)
