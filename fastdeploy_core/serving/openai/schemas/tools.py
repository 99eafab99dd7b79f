"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from fastdeploy_core.errors import InvalidRequest

from .chat import ChatCompletionRequest
from .common import MAX_NAME_CHARS, MAX_TOKEN_IDS, ApiModel


class Invocation(ApiModel):
    """Chat or text completion, by what it has."""

    messages: Any = None


class TokenizeRequest(ApiModel):
    """Text, or a conversation as in /v1/chat/completions."""

    model: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        return self

    def as_chat(self) -> ChatCompletionRequest:
        """The conversation as a chat request, with the same checks."""
        own = {"prompt", "return_token_strs"}
        return ChatCompletionRequest(**self.model_dump(exclude=own, exclude_none=True))


class DetokenizeRequest(ApiModel):
    """Token ids to text."""

    model: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    tokens: list[int] = Field(max_length=MAX_TOKEN_IDS)
    skip_special_tokens: bool = False
