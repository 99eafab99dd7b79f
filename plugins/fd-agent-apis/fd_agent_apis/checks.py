"""What bodies of both APIs have in common, and how their parts are read; an error names the
field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import ConfigDict, ValidationError

from fastdeploy_core.errors import InvalidRequest, RequestTooLong
from fastdeploy_core.serving.http.errors import ApiError, to_api_error
from fastdeploy_core.serving.openai.schemas.common import ApiModel

_KINDS = {str: "text", dict: "an object", list: "a list", bool: "true or false", int: "a number"}
# Parts of a conversation that carry more than text, in both APIs' names.
_NOT_TEXT = {
    "image": "a picture",
    "input_image": "a picture",
    "image_url": "a picture",
    "document": "a document",
    "input_file": "a file",
    "input_audio": "sound",
}
CALLS_NONE = "this server calls no other; give the tools as functions in tools"
# Fields of chat that clients of vLLM send to these APIs, too.
_OF_CHAT = frozenset(
    {"top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"}
    | {"stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"}
    | {"logit_bias", "bad_words", "allowed_token_ids", "structured_outputs", "vllm_xargs"}
    | {"skip_special_tokens", "thinking_token_budget", "priority", "cache_salt", "request_id"}
    | {"mm_processor_kwargs", "chat_template_kwargs"}
)


class AgentBody(ApiModel):
    """A body of either API. What it has of chat's fields is kept as it is: chat checks it."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    also_known: ClassVar[frozenset[str]] = _OF_CHAT

    def chat_fields(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The chat request's fields: `own` ones, which this API has, and the others."""
        given = {key: value for key, value in (self.model_extra or {}).items() if key in _OF_CHAT}
        fields = {**given, **{key: value for key, value in own.items() if value is not None}}
        switches = given.get("chat_template_kwargs")
        if isinstance(switches, dict):
            fields["chat_template_kwargs"] = {**own.get("chat_template_kwargs", {}), **switches}
        return {key: value for key, value in fields.items() if value is not None}


def _kind_of(value: Any) -> str:
    return "nothing" if value is None else _KINDS.get(type(value), "a number")


def _check(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:
        raise InvalidRequest(f"{where} must be {_KINDS[kind]}, got {_kind_of(value)}", param=where)
    return value


def text(value: Any, where: str) -> str:
    """A text; InvalidRequest for anything else, as in all functions here."""
    checked: str = _check(value, str, where)
    return checked


def record(value: Any, where: str) -> dict[str, Any]:
    """An object."""
    checked: dict[str, Any] = _check(value, dict, where)
    return checked


def records(value: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a list, each with its place; nothing for null."""
    for number, item in enumerate([] if value is None else _check(value, list, where)):
        yield f"{where}.{number}", record(item, f"{where}.{number}")


def name(value: Any, where: str) -> str:
    """A text that is not empty."""
    if not text(value, where):
        raise InvalidRequest(f"{where} must not be empty", param=where)
    return str(value)


def one_of(value: Any, possible: tuple[str, ...], where: str) -> str:
    """One of the texts that are possible."""
    if value not in possible:
        raise InvalidRequest(
            f"{where} is {value!r:.40}; possible: {', '.join(possible)}", param=where
        )
    return str(value)


def picture(url: Any, where: str, begin: str = "") -> dict[str, Any]:
    """A picture as the chat path takes it: an address, or data after `begin`."""
    return {"type": "image_url", "image_url": {"url": begin + name(url, where)}}


def refuse_what_is_not_text(kind: Any, where: str, shown: str = "") -> None:
    """InvalidRequest for pictures, files and sounds that this model does not take at this place.
    `shown`: how a picture is spelled where it does take one."""
    if shown and isinstance(kind, str) and _NOT_TEXT.get(kind) == "a picture":
        raise InvalidRequest(
            f"{where} is a picture of type {kind}; possible here: {shown}", param=where
        )
    if isinstance(kind, str) and kind in _NOT_TEXT:
        raise InvalidRequest(
            f"{where} is {_NOT_TEXT[kind]} ({kind}), which this model does not take here; send "
            "what it says as text",
            param=where,
        )


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the chat path, with its fields named as this API has them."""
    try:
        yield
    except RequestTooLong:
        raise
    except (InvalidRequest, ValidationError) as error:
        answer = to_api_error(error)
        first = re.split(r"[.\[]", answer.param or "", maxsplit=1)[0]
        param = names.get(first, answer.param)
        message = answer.message
        if param and param not in message:
            message = f"{param}: {message}"
        raise ApiError(answer.status, message, param=param) from error
