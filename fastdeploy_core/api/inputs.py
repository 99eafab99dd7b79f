"""Normalises the many forms in which prompts, conversations and parameters may be given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fastdeploy_core.contracts.model import MediaPart
from fastdeploy_core.engine.input import Truncation
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import SequenceExtras

# str, {"prompt": ...}, {"prompt_token_ids": ...}, [ids], or a list of these
Prompts = str | Mapping[str, Any] | Sequence[Any]
_PROMPT_KEYS = (
    "prompt",
    "prompt_token_ids",
    "cache_salt",
    "multi_modal_data",
    "mm_processor_kwargs",
    "routed_experts",
)


class Prompt(msgspec.Struct, gc=False):
    """Text, or token ids, or both; with both, the ids are used and the text is only shown."""

    text: str | None
    token_ids: Sequence[int] | None = None  # the caller's own
    cache_salt: str = ""
    add_special_tokens: bool = True
    media: Sequence[MediaPart] = ()
    truncation: Truncation | None = None
    extras: SequenceExtras | None = None  # of a model that takes no pictures


def normalise_prompts(prompts: Prompts) -> list[Prompt]:
    """One Prompt for each prompt given; InvalidRequest names the one that is malformed."""
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_prompt(prompts, "prompt")]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"prompts must be text, token ids, or a list of them, got {type(prompts).__name__}",
            param="prompts",
        )
    return [_prompt(each, f"prompts[{i}]") for i, each in enumerate(prompts)]


def conversations(messages: Sequence[Any]) -> list[Sequence[Mapping[str, Any]]]:
    """A list of conversations, from one conversation or a list of them."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest(
            "messages must be a conversation (a list of messages) or a list of conversations",
            param="messages",
        )
    if isinstance(messages[0], Sequence) and not isinstance(messages[0], str):
        return list(messages)
    return [messages]


def one_each(name: str, value: Any, count: int) -> list[Any]:
    """A single value for all, or a list that has one for each."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(
            f"{name} has {len(value)} entries for {count} prompts; give one for all, or one each",
            param=name,
        )
    return list(value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and type(value[0]) is int


def _prompt(value: Any, where: str) -> Prompt:
    if isinstance(value, str):
        return Prompt(value)
    if _is_ids(value):
        return Prompt(None, value)
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f"{where} must be text, token ids or an object, got {type(value).__name__}",
            param="prompts",
        )
    unknown = [key for key in value if key not in _PROMPT_KEYS and value[key] is not None]
    text, ids = value.get("prompt"), value.get("prompt_token_ids")
    if unknown or (text is None and ids is None):
        raise InvalidRequest(
            f"{where} needs 'prompt' or 'prompt_token_ids'; found: "
            f"{', '.join(map(str, value)) or 'nothing'}; possible: {', '.join(_PROMPT_KEYS)}",
            param="prompts",
        )
    is_text, is_list = isinstance(text, str | None), isinstance(ids, Sequence | None)
    if not is_text or not is_list or isinstance(ids, str):
        raise InvalidRequest(f"{where}: prompt is text, prompt_token_ids a list", param="prompts")
    asked = value.get("mm_processor_kwargs") or {}
    media = _media(value.get("multi_modal_data") or {}, asked, where)
    salt = str(value.get("cache_salt") or "")
    extras = SequenceExtras(routes=value["routed_experts"]) if value.get("routed_experts") else None
    return Prompt(text, ids, salt, media=media, extras=extras)


def _media(data: Any, options: Any, where: str) -> list[MediaPart]:
    """multi_modal_data as vLLM spells it: {"image": one or a list}."""
    if not isinstance(data, Mapping) or not isinstance(options, Mapping) or (options and not data):
        raise InvalidRequest(
            f"{where}: multi_modal_data is an object, mm_processor_kwargs another, for its items",
            param="prompts",
        )
    return [
        MediaPart(str(kind), item, f"{where}.multi_modal_data.{kind}", options)
        for kind, items in data.items()
        for item in (items if isinstance(items, list) else [items])
    ]
