"""Fields that chat and text completion share, in OpenAI's, vLLM's and FastDeploy 2.x's spellings.

Unknown fields are ignored, as clients of all three expect, and named in a response header. Known
fields that cannot be honoured are refused with a reason (unsupported.py). SamplingParams checks
ranges; limits on size are checked here, before any work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fastdeploy_core.engine.input import Truncation
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.plugins.drivers import part
from fastdeploy_core.types import SamplingParams, StructuredOutputsParams

from .unsupported import NO_EFFECT, REFUSED, refuse_unsupported

MAX_PROMPTS = 512
MAX_TOKEN_IDS = 2**18  # no list in a body may be longer
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_NAME_CHARS = 256
MAX_CACHE_SALT_CHARS = 128
MAX_STREAM_INTERVAL = 4096
MAX_ARGS_CHARS = 16 * 1024
MAX_ROUTES_CHARS = 2**28

# Fields that go to SamplingParams unchanged. Their default here is None: without a value in the
# call, the model's default counts.
_SAME_NAME = {*SamplingParams.__struct_fields__} - {"max_tokens", "logprobs", "structured_outputs"}

_CONSTRAINTS = {f"guided_{kind}": kind for kind in StructuredOutputsParams.__struct_fields__}
_CONSTRAINTS["structural_tag"] = _CONSTRAINTS.pop("guided_structural_tag")


class ApiModel(BaseModel):
    """Strict types (no "3" for 3, no true for 1), finite numbers, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, data: Any) -> Any:
        """100.0 is 100: JSON has one kind of number, and some clients write all with a point."""
        if not isinstance(data, dict):
            return data
        return {
            name: int(value) if type(value) is float and value.is_integer() else value
            for name, value in data.items()
        }


class StreamOptions(ApiModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    include_obfuscation: Literal[False] | None = None  # OpenAI's padding of chunks is never sent
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(ApiModel):
    """`json_schema` of a response format."""

    name: str = "response"
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    """OpenAI's way to ask for structured output, and vLLM's structural tags."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(ApiModel):
    """vLLM's way to ask for structured output; exactly one constraint."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _what_is_asked(cls, data: Any) -> Any:
        """Without what is null or false: vLLM's own objects have a value for every field."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value not in (None, False)}


class SamplingFields(ApiModel):
    """Everything that chat and text completion requests have in common."""

    # Known fields without an attribute of this class.
    also_known: ClassVar[frozenset[str]] = frozenset({*REFUSED, *NO_EFFECT})

    model: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = Field(default=None, ge=1)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[int | list[int]] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = Field(default=None, max_length=MAX_ALLOWED_TOKEN_IDS)
    prompt_logprobs: bool | int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logits_processors_args: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None  # vLLM's name for these
    thinking_token_budget: int | None = None
    reasoning_max_tokens: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(
        default=None, min_length=1, max_length=MAX_CACHE_SALT_CHARS, pattern=r"^[^@\\\s]+$"
    )
    prompt_token_ids: list[int] | None = Field(default=None, max_length=MAX_TOKEN_IDS)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    stream_interval: int | None = Field(default=None, ge=1, le=MAX_STREAM_INTERVAL)
    max_streaming_response_tokens: int | None = Field(default=None, ge=1, le=MAX_STREAM_INTERVAL)
    routed_experts: str | None = Field(default=None, max_length=MAX_ROUTES_CHARS)
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]{1,128}$")

    @model_validator(mode="before")
    @classmethod
    def _refuse_known(cls, data: Any) -> Any:
        if isinstance(data, dict):
            refuse_unsupported(data)
        return data

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream=true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        return self

    @field_validator("logits_processors_args", "vllm_xargs")
    @classmethod
    def _is_small(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and len(json.dumps(value, ensure_ascii=False)) > MAX_ARGS_CHARS:
            raise ValueError(f"at most {MAX_ARGS_CHARS} characters of JSON are possible")
        return value

    @field_validator("prompt_logprobs")
    @classmethod
    def _as_number(cls, value: int | None) -> int | None:
        return value if not isinstance(value, bool) else (1 if value else None)

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keeps_something(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("0 would leave nothing of the prompt; use -1 or 1 and up")
        return value

    def truncation(self) -> Truncation | None:
        """How to cut the prompt, if it may be cut."""
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(self.truncate_prompt_tokens, self.truncation_side or "left")

    def chunk_tokens(self, default: int) -> int:
        """New tokens that each chunk of a stream waits for, as vLLM or FastDeploy 2.x spell it."""
        asked = [n for n in (self.stream_interval, self.max_streaming_response_tokens) if n]
        return max(asked, default=default)

    def include_usage(self, forced: bool) -> tuple[bool, bool]:
        """Whether the stream ends with a usage chunk, and whether each chunk carries usage."""
        options = self.stream_options or StreamOptions()
        at_end = bool(options.include_usage) or forced
        return at_end, at_end and (bool(options.continuous_usage_stats) or forced)

    def constraint(self) -> StructuredOutputsParams | None:
        """The one constraint on the answer, in whichever spelling it was given."""
        found: list[dict[str, Any]] = []
        if self.structured_outputs is not None:
            found.append(self.structured_outputs.model_dump(by_alias=True, exclude_none=True))
        given = self.model_dump(include={*_CONSTRAINTS}, exclude_none=True)
        if guided := {_CONSTRAINTS[n]: value for n, value in given.items() if value is not False}:
            found.append(guided)
        if self.response_format is not None and (asked := _from_format(self.response_format)):
            found.append(asked)
        if not found:
            return None
        if any(other != found[0] for other in found[1:]):
            raise InvalidRequest(
                "response_format, structured_outputs and guided_* ask for different grammars; "
                "give one of them",
                param="structured_outputs",
            )
        options = dict(found[0])
        if isinstance(options.get("structural_tag"), dict):
            options["structural_tag"] = json.dumps(options["structural_tag"], ensure_ascii=False)
        return StructuredOutputsParams(**options)

    def sampling(self, defaults: Mapping[str, Any], **decided: Any) -> SamplingParams:
        """Sampling parameters: the model's defaults, then the request's fields, then `decided`."""
        names = self.model_fields_set & _SAME_NAME
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.reasoning_max_tokens is not None:  # FastDeploy 2.x's name
            given.setdefault("thinking_token_budget", self.reasoning_max_tokens)
        if self.vllm_xargs:
            given["logits_processors_args"] = self.vllm_xargs | (self.logits_processors_args or {})
        values = {**defaults, **given, **decided}
        if self.use_beam_search:
            found: SamplingParams = part("beam-sampling", "use_beam_search")(self, values)
            return found
        return SamplingParams(**values)


def _from_format(wanted: ResponseFormat) -> dict[str, Any] | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":  # with a schema as clients of llama.cpp spell it
        given = (wanted.model_extra or {}).get("schema") or None
        return {"json": given} if isinstance(given, dict) else {"json_object": True}
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise InvalidRequest(
                "response_format json_schema needs json_schema.schema", param="response_format"
            )
        schema = wanted.json_schema.schema_
        return {"json": schema if isinstance(schema, dict) else json.dumps(schema)}
    if wanted.type == "structural_tag":
        return {"structural_tag": wanted.model_dump(exclude_none=True)}
    raise InvalidRequest(
        f"response_format has an unknown type {wanted.type!r:.40}; possible: text, json_object, "
        "json_schema, structural_tag",
        param="response_format",
    )
