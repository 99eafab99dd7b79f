"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from fastdeploy_core.engine.input import are_integers
from fastdeploy_core.errors import InvalidRequest

from .common import MAX_PROMPTS, MAX_TOKEN_IDS, SamplingFields

Prompt = str | list[int]


class CompletionRequest(SamplingFields):
    """A text completion: one or many prompts, as text or as token ids."""

    prompt: Any = None  # its four forms are told apart below, with clearer errors than a union's
    suffix: Any = None
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1)
    logprobs: int | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    add_special_tokens: bool = True

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: Any) -> Any:
        if value not in (None, "", {}):
            raise InvalidRequest("suffix is not supported by this model", param="suffix")
        return value

    @field_validator("prompt")
    @classmethod
    def _known_shape(cls, value: Any) -> Any:
        return None if value is None else split_prompts(value)

    @model_validator(mode="after")
    def _rules(self) -> CompletionRequest:
        n = self.n or 1
        best = self.best_of or n
        if best < n:
            raise InvalidRequest(f"best_of ({best}) must not be below n ({n})", param="best_of")
        if best > n and self.stream:
            raise InvalidRequest("best_of above n cannot be streamed", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens must be at least 1 unless echo is true", param="max_tokens"
            )
        if self.logprob_token_ids and (self.logprobs is None or self.max_tokens == 0):
            raise InvalidRequest(
                "logprob_token_ids needs logprobs, and max_tokens of at least 1",
                param="logprob_token_ids",
            )
        return self

    def prompts(self) -> list[Prompt]:
        """The prompts in order; at least one."""
        if self.prompt_token_ids is not None:
            if not self.prompt_token_ids:
                raise InvalidRequest("prompt_token_ids must not be empty", param="prompt_token_ids")
            return [self.prompt_token_ids]
        if self.prompt is None:
            raise InvalidRequest("prompt is missing", param="prompt")
        prompts: list[Prompt] = self.prompt
        return prompts


def split_prompts(value: Any) -> list[Prompt]:
    """The prompts in a string, a list of strings, token ids, or a list of token id lists."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise InvalidRequest("prompt must be text, token ids, or a list of these", param="prompt")
    is_one = value and are_integers(value)
    prompts: list[Prompt] = [value] if is_one else value
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}", param="prompt"
        )
    for item in prompts:
        if isinstance(item, str) and item:
            continue
        if isinstance(item, list) and item and are_integers(item) and min(item) >= 0:
            if len(item) <= MAX_TOKEN_IDS:
                continue
            raise InvalidRequest(f"a prompt has {len(item)} token ids", param="prompt")
        raise InvalidRequest(
            "each prompt must be non-empty text or a non-empty list of token ids", param="prompt"
        )
    return prompts
