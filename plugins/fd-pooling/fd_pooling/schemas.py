"""Bodies of the routes, in OpenAI's, vLLM's, Cohere's, Jina's and FastDeploy 2.x's spellings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.serving.openai.schemas.common import (
    MAX_CACHE_SALT_CHARS,
    MAX_NAME_CHARS,
    ApiModel,
)

from .prompts import Cut

MAX_INPUTS = 2048  # of one call, OpenAI's limit

NumberFormat = Literal["float32", "float16", "bfloat16"]
Inputs = str | list[int] | list[str] | list[list[int]]
Document = str | dict[str, Any]


class PoolingFields(ApiModel):
    """What all bodies have in common."""

    model: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    user: str | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    cache_salt: str | None = Field(
        default=None, min_length=1, max_length=MAX_CACHE_SALT_CHARS, pattern=r"^[^@\\\s]+$"
    )
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] = "right"
    use_activation: bool | None = None
    activation: bool | None = None  # older names of the same
    softmax: bool | None = None

    @property
    def is_raw(self) -> bool | None:
        """Whether norm and activation are left out; None: as the server is configured."""
        asked = (self.use_activation, self.activation, self.softmax)
        return next((not value for value in asked if value is not None), None)

    @property
    def cut(self) -> Cut | None:
        """How to cut prompts, if they may be cut."""
        if self.truncate_prompt_tokens is None:
            return None
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens 0 would leave nothing of the prompt; use -1 or 1 and up",
                param="truncate_prompt_tokens",
            )
        return Cut(self.truncate_prompt_tokens, self.truncation_side)


class InputRequest(PoolingFields):
    """Of /v1/embeddings, /pooling, /classify and /v1/reward: texts or token ids, or a
    conversation."""

    input: Inputs | None = None
    messages: list[dict[str, Any]] | list[list[dict[str, Any]]] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: NumberFormat = "float32"
    endianness: Literal["native", "little", "big"] = "native"
    dimensions: int | None = None
    normalize: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> InputRequest:
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("the body needs either input or messages", param="input")
        if self.chat_template is not None:
            raise InvalidRequest(
                "chat_template is not taken from requests; the server has --chat-template",
                param="chat_template",
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
        if self.input == [] or self.messages == []:
            name = "input" if self.messages is None else "messages"
            raise InvalidRequest(f"{name} must not be empty", param=name)
        if len(self.items()) > MAX_INPUTS:
            raise InvalidRequest(
                f"input has {len(self.items())} entries; at most {MAX_INPUTS} are possible",
                param="input",
            )
        return self

    @property
    def is_raw(self) -> bool | None:
        """As PoolingFields.is_raw; `normalize` is vLLM's older name."""
        return super().is_raw if self.normalize is None else not self.normalize

    def items(self) -> list[Any]:
        """Each a text, token ids or a conversation."""
        given: Any = self.messages if self.input is None else self.input
        if isinstance(given, str) or not isinstance(given[0], str | list):
            return [given]
        return list(given)


class PoolingRequest(InputRequest):
    """Of /pooling: what the server's model is for, as vLLM's clients may name it."""

    task: str | None = None


class PairFields(PoolingFields):
    """What /score and /rerank have in common."""

    instruction: str | None = None  # for rerankers that read one
    max_tokens_per_query: int | None = Field(default=None, ge=0)  # 0: all
    max_tokens_per_doc: int | None = Field(default=None, ge=0)


class ScoreRequest(PairFields):
    """Of /score: one or as many texts, and texts."""

    queries: Document | list[Document] | None = None
    documents: Document | list[Document] | None = None
    items: Document | list[Document] | None = None
    text_1: Document | list[Document] | None = None
    text_2: Document | list[Document] | None = None
    data_1: Document | list[Document] | None = None
    data_2: Document | list[Document] | None = None

    def sides(self) -> tuple[list[str], list[str]]:
        """Queries, one or one for each document; and documents."""
        pairs = (
            (self.queries, self.documents if self.items is None else self.items),
            (self.text_1, self.text_2),
            (self.data_1, self.data_2),
        )
        given = [pair for pair in pairs if pair != (None, None)]
        is_named_twice = self.items is not None and self.documents is not None
        if is_named_twice or len(given) != 1 or None in given[0]:
            raise InvalidRequest(
                "the body needs queries and documents (or text_1 and text_2)", param="queries"
            )
        one, two = (
            [text_of(item, name) for item in (side if isinstance(side, list) else [side])]
            for side, name in zip(given[0], ("queries", "documents"), strict=True)
        )
        if not one or not two or len(one) not in (1, len(two)):
            raise InvalidRequest(
                f"{len(one)} queries and {len(two)} documents are no pairs; give one query, or one "
                "for each document",
                param="queries",
            )
        _check_count(two)
        return one, two


class RerankRequest(PairFields):
    """Of /rerank, as Jina and Cohere have it."""

    query: Document
    documents: list[Document]
    top_n: int | None = Field(default=None, ge=0)
    return_documents: bool = True

    def texts(self) -> tuple[str, list[str]]:
        """The query and the documents."""
        documents = [text_of(item, "documents") for item in self.documents]
        if not documents:
            raise InvalidRequest("documents must not be empty", param="documents")
        _check_count(documents)
        return text_of(self.query, "query"), documents


class EmbedRequest(PoolingFields):
    """Of /v1/embed and /v2/embed, Cohere's."""

    texts: list[str] | None = None
    inputs: list[Document] | None = None
    images: list[str] | None = None
    input_type: str | None = None
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: int | None = Field(default=None, ge=1)

    def items(self) -> list[str]:
        """What is embedded."""
        if self.images is not None:
            raise InvalidRequest("pictures have no embeddings here; give texts", param="images")
        if (self.texts is None) == (self.inputs is None):
            raise InvalidRequest("the body needs either texts or inputs", param="texts")
        return self.texts or [text_of(item, "inputs") for item in self.inputs or ()]

    def as_input(self, prompts: Mapping[str, str]) -> InputRequest:
        """The same as a body of /v1/embeddings. prompts: what the model's authors write before
        texts, by what these are for; of others nothing is written."""
        kind = self.input_type or ""
        before = prompts.get(kind, prompts.get(kind.removeprefix("search_"), ""))
        cut: dict[str, Any] = {}
        if self.truncate != "NONE":
            side = "left" if self.truncate == "START" else "right"
            cut = {"truncate_prompt_tokens": self.max_tokens or -1, "truncation_side": side}
        same = self.model_dump(include={"model", "priority", "request_id", "cache_salt"})
        texts = [before + text for text in self.items()]
        return InputRequest(input=texts, dimensions=self.output_dimension, **same, **cut)


class Invocation(ApiModel):
    """Of /invocations: the keys that tell which route's body it is."""

    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None
    texts: Any = None
    inputs: Any = None


def _check_count(documents: list[str]) -> None:
    if len(documents) > MAX_INPUTS:
        raise InvalidRequest(
            f"documents has {len(documents)} entries; at most {MAX_INPUTS} are possible",
            param="documents",
        )


def text_of(item: Document | None, where: str) -> str:
    """The text of a query or document: itself, {"text": ...}, or {"content": [text parts]}."""
    if isinstance(item, str):
        return item
    if isinstance(item, dict) and isinstance(item.get("text"), str):
        return str(item["text"])
    parts = item.get("content") if isinstance(item, dict) else None
    if isinstance(parts, list) and all(
        isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str)
        for p in parts
    ):
        return "\n".join(p["text"] for p in parts)
    raise InvalidRequest(
        f'{where} holds something that is no text; possible: "TEXT", {{"text": "TEXT"}}',
        param=where,
    )
