"""Texts, pairs and conversations to token ids, as the model was trained to read them.

A reranker is as good as its template: without it, a model's scores look plausible and rank wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastdeploy_core.engine.input import RequestLimits
from fastdeploy_core.errors import ConfigError, InvalidRequest, RequestTooLong
from fastdeploy_core.tokenizer import Tokenizer

from .settings import PoolingSettings

# Model card of Qwen3-Reranker (transformers usage): words around the pair, and the pair.
QWEN3_INSTRUCTION: Final = (
    "Given a web search query, retrieve relevant passages that answer the query"
)
QWEN3_BEFORE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
QWEN3_PAIR: Final = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
QWEN3_BEHIND: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Cut:
    """How prompts that are too long are cut. The special tokens around them stay."""

    max_tokens: int = -1  # of a prompt; -1: as many as the model takes
    side: str = "right"  # the end that is cut off


class Prompter:
    """Thread safe."""

    def __init__(
        self, settings: PoolingSettings, tokenizer: Tokenizer | None, limits: RequestLimits
    ) -> None:
        self._settings, self._tokenizer, self._limits = settings, tokenizer, limits

    @property
    def tokenizer(self) -> Tokenizer:
        """ConfigError for an LLM without one."""
        if self._tokenizer is None:
            raise ConfigError("texts need a tokenizer, and none is loaded; give token ids")
        return self._tokenizer

    def text(self, text: str, add_special_tokens: bool = True, cut: Cut | None = None) -> list[int]:
        """One text."""
        if cut is None:
            self._limits.check_text(text, "input")
            return self.tokenizer.encode(text, add_special_tokens)
        backend, room = self.tokenizer._backend, self._room(cut)
        piece = self._near(text, cut)
        encoding = backend.encode(piece, add_special_tokens=False)
        if add_special_tokens:
            room -= backend.num_special_tokens_to_add(False)
        encoding.truncate(max(1, room), 0, cut.side)
        ids: list[int] = backend.post_process(encoding, None, add_special_tokens).ids
        return ids

    def ids(self, ids: Sequence[int], cut: Cut | None = None) -> list[int]:
        """A prompt that came as token ids."""
        room = len(ids) if cut is None else self._room(cut)
        return list(ids[:room] if cut is None or cut.side == "right" else ids[-room:])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """One conversation."""
        text = self.tokenizer.apply_chat_template(
            messages,
            None,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        self._limits.check_text(text, "messages")
        return self.tokenizer.encode(text, add_special_tokens)

    def pair(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        cut: Cut | None = None,
    ) -> list[int]:
        """A query and a document, in one prompt."""
        for text, name in ((query, "query"), (document, "documents")) if cut is None else ():
            self._limits.check_text(text, name)
        if self._settings.template:
            return self._qwen3(query, document, instruction, cut)
        if instruction is not None:
            raise InvalidRequest(
                "this model's pairs have no instruction; leave it out", param="instruction"
            )
        backend = self.tokenizer._backend
        one, two = (
            backend.encode(text if cut is None else self._near(text, cut), add_special_tokens=False)
            for text in (query, document)
        )
        if cut is not None:
            room = self._room(cut) - backend.num_special_tokens_to_add(True)
            for encoding, length in zip(
                (one, two), _longest_first(len(one.ids), len(two.ids), max(2, room)), strict=True
            ):
                encoding.truncate(length, 0, cut.side)
        ids: list[int] = backend.post_process(one, two, True).ids
        return ids

    def steps(self, ids: list[int]) -> list[list[int]]:
        """What is pooled of a prompt: itself; or, of STEP, its beginnings up to each step's token.
        Tokens see earlier ones alone, and the prefix cache holds these."""
        if self._settings.pooling_type != "STEP":
            return [ids]
        marks = {*self._settings.token_ids}
        found = [ids[: number + 1] for number, token in enumerate(ids) if token in marks]
        if not found:
            raise InvalidRequest(
                f"the prompt holds no token that ends a step ({sorted(marks)}), so no step has a "
                "reward",
                param="input",
            )
        return found

    def _qwen3(
        self, query: str, document: str, instruction: str | None, cut: Cut | None
    ) -> list[int]:
        tokenizer = self.tokenizer
        before, behind = (tokenizer.encode(text, False) for text in (QWEN3_BEFORE, QWEN3_BEHIND))
        told = QWEN3_INSTRUCTION if instruction is None else instruction
        text = QWEN3_PAIR.format(instruction=told, query=query, document=document)
        # Special tokens in what users write are text: a document cannot end its own turn.
        special = tokenizer._special_text
        ids = tokenizer.encode(special.unmark(special.mark(text)) if special else text, False)
        if cut is not None:
            room = max(1, self._room(cut) - len(before) - len(behind))
            ids = ids[:room] if cut.side == "right" else ids[-room:]
        return [*before, *ids, *behind]

    def _room(self, cut: Cut) -> int:
        longest = self._limits.max_model_len
        if cut.max_tokens > longest:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at most {longest}, the context length of this "
                f"model, got {cut.max_tokens}",
                param="truncate_prompt_tokens",
            )
        return longest if cut.max_tokens < 0 else cut.max_tokens

    def _near(self, text: str, cut: Cut) -> str:
        """More than enough of the end that is kept."""
        most = self._limits.max_chars
        return text[:most] if cut.side == "right" else text[-most:]

    def beginning(self, text: str, num_tokens: int | None) -> str:
        """The first tokens of a text, without special ones; None or 0: all of it."""
        if not num_tokens:
            return text
        encoding = self.tokenizer._backend.encode(
            text[: self._limits.max_chars], add_special_tokens=False
        )
        offsets = encoding.offsets
        return text if len(offsets) <= num_tokens else text[: offsets[num_tokens - 1][1]]

    def check(self, ids: list[int], param: str) -> None:
        """RequestTooLong or InvalidRequest, with the name that the caller knows."""
        longest = self._limits.max_model_len
        if not ids:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        if len(ids) > longest:
            raise RequestTooLong(
                f"{param} has {len(ids)} tokens; this model takes at most {longest}. Please "
                "shorten it, or pass truncate_prompt_tokens: -1",
                param=param,
            )


def _longest_first(one: int, two: int, room: int) -> tuple[int, int]:
    """Tokens of each text of a pair that are kept: the longer one gives way, as in tokenizers'
    "longest_first"."""
    if one + two <= room:
        return one, two
    short = min(one, two)
    if short <= room // 2:
        return (short, room - short) if one <= two else (room - short, short)
    half = room // 2
    return (half, room - half) if one <= two else (room - half, half)
