"""Log-probabilities in the forms of OpenAI's two APIs and of vLLM. NaN and infinity are never
sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_core.types import Logprob

LOWEST = -9999.0  # OpenAI's value for an impossible token

Position = dict[int, Logprob]


def finite(value: float) -> float:
    """The log-probability, or the lowest one that JSON can carry."""
    return value if math.isfinite(value) and value > LOWEST else LOWEST


class TokenNames:
    """How a token is written in answers: as text, as bytes when it is no text, or as its id."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, token_id: int) -> str:
        """The name of a token."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self._tokenizer.token_text(token_id)

    def raw(self, token_id: int) -> list[int]:
        """The bytes of a token, as numbers."""
        return list(self._tokenizer.token_bytes(token_id))


def best(position: Position, count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely tokens of a position, best first; -1: all of them."""
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    if count < 0:
        return ranked
    return [item for item in ranked if (item[1].rank or 0) <= count]


def chat_logprobs(
    positions: Sequence[Position], token_ids: Sequence[int], top: int, names: TokenNames
) -> dict[str, Any]:
    """`logprobs` of a chat choice or of its delta."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": names(token_id),
            "logprob": finite(logprob.logprob),
            "bytes": names.raw(token_id),
        }

    content = [
        {
            **entry(token_id, position[token_id]),
            "top_logprobs": [entry(other, logprob) for other, logprob in best(position, top)],
        }
        for token_id, position in zip(token_ids, positions, strict=True)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of a text completion; offsets continue from one delta to the next."""

    def __init__(self, top: int, names: TokenNames, offset: int = 0) -> None:
        self._top = top
        self._names = names
        self._offset = offset

    def render(
        self, positions: Sequence[Position | None], token_ids: Sequence[int]
    ) -> dict[str, Any]:
        """The next tokens; a position without values is the first token of a prompt."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, position in zip(token_ids, positions, strict=True):
            name = self._names(token_id)
            tokens.append(name)
            offsets.append(self._offset)
            self._offset += len(name)
            if position is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(finite(position[token_id].logprob))
            # as in vLLM: the token itself, then the most likely ones
            shown = {name: finite(position[token_id].logprob)}
            for other, value in best(position, self._top):
                shown.setdefault(self._names(other), finite(value.logprob))
            tops.append(shown)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def prompt_logprobs(positions: Sequence[Position | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: token id to logprob, rank and text; None for the first token."""
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": finite(value.logprob),
                "rank": value.rank,
                "decoded_token": value.decoded_token,
            }
            for token_id, value in position.items()
        }
        for position in positions
    ]
