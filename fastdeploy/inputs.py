"""Prompts of LLM.generate as typed dictionaries, with vLLM's names."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class _PromptOptions(TypedDict):
    multi_modal_data: NotRequired[dict[str, Any] | None]  # {"image": one or a list}
    mm_processor_kwargs: NotRequired[dict[str, Any] | None]
    cache_salt: NotRequired[str]


class TextPrompt(_PromptOptions):
    """Text to be continued."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """Token ids to be continued; the text, if given, is only shown."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt
